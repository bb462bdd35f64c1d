#include "routing/substitute/choose.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace pyorch {
namespace {

uint64_t mix(uint64_t x) { // splitmix64
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

} // namespace

Chooser::Chooser(const pyorch_substitution & settings, const BuddyLists & lists, const RoutedBatch & batch,
    const uint8_t * resident) :
        settings(settings), lists(lists), batch(batch), resident(resident), taken(batch.n_expert),
        n_chosen(batch.n_expert) {}

void Chooser::begin(int token, const int32_t * experts) {
    t = token;
    std::fill(taken.begin(), taken.end(), 0);
    for (int s = 0; s < batch.n_used; ++s) {
        taken[experts[s]] = 1;
    }
    if (settings.mode == PYORCH_SUBSTITUTE_BUDDIES && settings.eta != 0) {
        const float * z    = batch.logits + (size_t) t * batch.n_expert;
        const auto    ends = std::minmax_element(z, z + batch.n_expert);
        low                = *ends.first;
        span               = *ends.second - low;
    }
}

int Chooser::find(int expert, int & rank) const {
    rank = 0;
    return settings.mode == PYORCH_SUBSTITUTE_BUDDIES ? choose_buddy(expert, rank) :
        settings.mode == PYORCH_SUBSTITUTE_RANDOM     ? choose_random(expert) :
        settings.mode == PYORCH_SUBSTITUTE_CACHE      ? choose_ranked(expert) :
                                                        -1;
}

// Psi, eq. 3. Algorithm 1 never gives a token an expert twice: the discount of reuse spreads the tokens of a batch.
double Chooser::priority(int buddy, double q) const {
    const double z   = span > 0 ? (batch.logits[(size_t) t * batch.n_expert + buddy] - low) / span : 0;
    const int    hop = resident[buddy] - 1;
    return q * (1 + settings.eta * z) * (1 - settings.kappa * hop) * std::pow(settings.reuse, n_chosen[buddy]);
}

// For equal priorities it takes the more similar buddy. With the default settings the priority is q.
int Chooser::choose_buddy(int expert, int & rank) const {
    const size_t list = (size_t) expert * lists.k_max;
    int          best = -1;
    double       most = 0;
    for (int r = 0; r < lists.k_max && lists.ids[list + r] >= 0; ++r) {
        const int    buddy = lists.ids[list + r];
        const double psi   = free(buddy) ? priority(buddy, lists.q[list + r]) : 0;
        if (free(buddy) && (best < 0 || psi > most)) {
            best = buddy;
            most = psi;
            rank = r;
        }
    }
    return best;
}

// Returns the router's rank value of an expert for this token: logits distinguish what gating rounds to one
// probability.
float Chooser::score(int expert) const {
    const size_t at = (size_t) t * batch.n_expert + expert;
    return batch.selection_bias ? batch.probs[at] + batch.selection_bias[expert] : batch.logits[at];
}

// Returns the free resident expert that the router ranks highest, if it is among the first so many and its logit is
// close enough to the absent expert's (max-rank routing; with a bonus, as if resident experts had so much more).
int Chooser::choose_ranked(int expert) const {
    const float * z    = batch.logits + (size_t) t * batch.n_expert;
    int           best = -1;
    for (int id = 0; id < batch.n_expert; ++id) {
        if (free(id) && (best < 0 || score(id) > score(best))) {
            best = id;
        }
    }
    if (best < 0 || (double) z[best] + settings.bonus < z[expert]) {
        return -1;
    }
    int above = 0;
    for (int id = 0; id < batch.n_expert; ++id) {
        above += score(id) > score(best) || (score(id) == score(best) && id < best);
    }
    return settings.among == 0 || above < settings.among ? best : -1;
}

// Returns a free resident expert, uniformly. The random number comes from the router's values, so it does not depend on
// how tokens are batched.
int Chooser::choose_random(int expert) const {
    int n = 0;
    for (int id = 0; id < batch.n_expert; ++id) {
        n += free(id);
    }
    if (n == 0) {
        return -1;
    }
    uint32_t bits;
    memcpy(&bits, batch.probs + (size_t) t * batch.n_expert + expert, sizeof(bits));
    int nth = (int) (mix(mix(mix(settings.seed) ^ (uint64_t) batch.il) ^ ((uint64_t) bits << 32 | (uint64_t) expert)) %
        (uint64_t) n);
    for (int id = 0;; ++id) {
        if (free(id) && nth-- == 0) {
            return id;
        }
    }
}

} // namespace pyorch
