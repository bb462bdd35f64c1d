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

float BuddyLists::at(const std::vector<float> & values, int expert, int rank) const {
    return values.empty() ? NAN : values[(size_t) expert * k_max + rank];
}

Chooser::Chooser(const pyorch_substitution & settings, const BuddyLists & lists, const RoutedBatch & batch,
    const uint8_t * resident) :
        settings(settings), lists(lists), batch(batch), resident(resident), taken(batch.n_expert),
        chosen(batch.n_expert) {}

void Chooser::begin(int token, const int32_t * experts) {
    t = token;
    std::fill(taken.begin(), taken.end(), 0);
    for (int s = 0; s < batch.n_used; ++s) {
        taken[experts[s]] = 1;
    }
}

int Chooser::find(int expert, int & rank) const {
    rank = 0;
    return settings.mode == PYORCH_SUBSTITUTE_BUDDIES ? choose_buddy(expert, rank) :
        settings.mode == PYORCH_SUBSTITUTE_RANDOM     ? choose_random(expert) :
        settings.mode == PYORCH_SUBSTITUTE_CACHE      ? choose_ranked(expert) :
                                                        -1;
}

void Chooser::take(int substitute) {
    taken[substitute] = 1;
    ++chosen[substitute];
}

int Chooser::choose_buddy(int expert, int & rank) const {
    const int32_t * ids = lists.ids.data() + (size_t) expert * lists.k_max;
    const int       end = settings.search_rank > 0 ? std::min(settings.search_rank, lists.k_max) : lists.k_max;
    int             n   = 0;
    while (n < end && ids[n] >= 0) {
        ++n;
    }
    thread_local std::vector<int> order;
    order.resize(n);
    std::iota(order.begin(), order.end(), 0);
    if (settings.eta != 0 || settings.kappa != 0 || settings.reuse != 1) {
        thread_local std::vector<double> priority;
        priority.resize(n);
        for (int r = 0; r < n; ++r) {
            priority[r] = priority_of(ids[r], lists.q[(size_t) expert * lists.k_max + r]);
        }
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return priority[a] > priority[b]; });
    }
    for (int r : order) {
        if (free(ids[r])) {
            rank = r;
            return ids[r];
        }
    }
    return -1;
}

// Psi, eq. 3. A token never gets an expert twice; the discount spreads the tokens of a batch over several.
double Chooser::priority_of(int buddy, double q) const {
    double psi = q;
    if (settings.eta != 0) {
        const float * z    = batch.logits + (size_t) t * batch.n_expert;
        const auto    lim  = std::minmax_element(z, z + batch.n_expert);
        const double  low  = *lim.first;
        const double  span = *lim.second - low;
        psi *= 1 + settings.eta * (span > 0 ? (z[buddy] - low) / span : 0);
    }
    if (settings.kappa != 0) {
        psi *= 1 - settings.kappa * (resident[buddy] == AT_PEER);
    }
    return settings.reuse != 1 ? psi * std::pow(settings.reuse, chosen[buddy]) : psi;
}

// By what the router ranks an expert for this token: logits tell apart what gating rounds to the same probability.
float Chooser::score(int expert) const {
    const size_t at = (size_t) t * batch.n_expert + expert;
    return batch.selection_bias ? batch.probs[at] + batch.selection_bias[expert] : batch.logits[at];
}

// Of the free residents the one that the router ranks highest, if it is among so many and its logit is not too far
// below that of the absent expert (max-rank routing; with a bonus, as if residents had so much more).
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

// Uniform over the free residents. The number is drawn from what the router said, so it does not depend on how tokens
// are batched.
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
