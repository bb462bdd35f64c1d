#include "routing/substitute/account.h"

#include "routing/substitute/gates.h"

#include <algorithm>
#include <optional>

namespace pyorch {

Account::Account(const pyorch_substitution & settings, const GhostLayer * ghosts, RoutedBatch & batch,
    const uint8_t * resident, pyorch_substitution_counts & counts) :
        settings(settings), ghosts(ghosts), batch(batch), resident(resident), counts(counts), before(batch.n_used),
        dropped(batch.n_used) {}

int Account::begin(int token) {
    first                   = (size_t) token * batch.n_used;
    const int32_t * experts = batch.experts + first;
    before.assign(experts, experts + batch.n_used);
    std::fill(dropped.begin(), dropped.end(), 0);
    n_substituted = n_dropped = n_ghosts = 0;
    return (int) std::count_if(before.begin(), before.end(), [&](int32_t e) { return !resident[e]; });
}

void Account::substitute(int slot, int expert, int rank) {
    batch.experts[first + slot] = expert;
    batch.deferred.push_back(before[slot]);
    ++n_substituted;
    counts.rank_sum += rank;
}

void Account::find_no_buddy(int slot) {
    ++counts.refused_buddies;
    const bool by_ghosts = ghosts && settings.on_miss == PYORCH_MISS_GHOST;
    if (by_ghosts && ghosts->has(before[slot])) {
        batch.ghosts.push_back((int) first + slot);
        ++n_ghosts;
    } else if (by_ghosts || settings.on_miss == PYORCH_MISS_DROP) {
        dropped[slot] = 1;
        ++n_dropped;
    } else {
        return;
    }
    batch.deferred.push_back(before[slot]);
}

void Account::end() {
    counts.substituted += n_substituted;
    counts.dropped += n_dropped;
    counts.ghosts += n_ghosts;
    if (n_changed() == 0) {
        return;
    }
    if (n_dropped > 0) {
        name_dropped();
    }
    std::sort(batch.ghosts.end() - n_ghosts, batch.ghosts.end());
    if (batch.changed) {
        batch.changed[first / batch.n_used] += n_changed();
    }
    ++counts.lossy_tokens;
    reweigh();
}

// Dropped slots name a resident expert with weight 0, because it may be computed.
void Account::name_dropped() {
    int32_t * experts  = batch.experts + first;
    int       stand_in = -1;
    for (int s = 0; s < batch.n_used && stand_in < 0; ++s) {
        stand_in = resident[experts[s]] ? experts[s] : -1;
    }
    for (int id = 0; id < batch.n_expert && stand_in < 0; ++id) {
        stand_in = resident[id] ? id : -1;
    }
    for (int s = 0; s < batch.n_used; ++s) {
        if (dropped[s]) {
            experts[s] = stand_in >= 0 ? stand_in : experts[s];
            batch.dropped.push_back((int) first + s);
        }
    }
}

// Dropped slots contribute nothing.
void Account::reweigh() {
    const int32_t *                  experts = batch.experts + first;
    float *                          weights = batch.weights + first;
    const bool                       own     = settings.mode == PYORCH_SUBSTITUTE_CACHE;
    double                           all     = 0;
    double                           left    = 0;
    thread_local std::vector<double> w;
    std::optional<RawWeights>        raw;
    if (own) {
        raw.emplace(batch, (int) (first / batch.n_used));
    }
    w.resize(batch.n_used);
    for (int s = 0; s < batch.n_used; ++s) {
        all += weights[s];
        w[s] = weights[s];
        if (own && experts[s] != before[s]) {
            const double was = raw->of(before[s]);
            w[s] *= was > 0 ? raw->of(experts[s]) / was : 0;
        }
        if (dropped[s]) {
            w[s] = 0;
        }
        left += w[s];
    }
    const double norm = batch.normalized && (own || n_dropped > 0) && left > 0 ? all / left : 1;
    for (int s = 0; s < batch.n_used; ++s) {
        weights[s] = (float) (w[s] * norm);
    }
}

} // namespace pyorch
