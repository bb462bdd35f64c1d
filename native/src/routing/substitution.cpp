#include "routing/substitution.h"

#include "base/status.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <cstring>
#include <numeric>

namespace pyorch {
namespace {

// The unnormalized weight of an expert for a token.
double raw_weight(const RoutedBatch & batch, int t, int expert, double offset) {
    const double p = batch.probs[(size_t) t * batch.n_expert + expert];
    return batch.softmax_selected ? std::exp(p - offset) : p;
}

// What raw_weight subtracts from logits, so that none overflows.
double largest_logit(const RoutedBatch & batch, int t) {
    if (!batch.softmax_selected) {
        return 0;
    }
    const float * p = batch.probs + (size_t) t * batch.n_expert;
    return *std::max_element(p, p + batch.n_expert);
}

struct Sensitivity {
    double entropy; // TAE, eq. 1
    double margin;  // of the two largest probabilities
};

// Of the renormalized probabilities of the selected experts, smoothed by a temperature.
Sensitivity sensitivity(const RoutedBatch & batch, int t, const int32_t * experts, double temperature) {
    const double                     offset = largest_logit(batch, t);
    thread_local std::vector<double> p;
    p.resize(batch.n_used);
    double sum = 0;
    for (int s = 0; s < batch.n_used; ++s) {
        p[s] = raw_weight(batch, t, experts[s], offset);
        if (temperature != 1) {
            p[s] = std::pow(p[s], 1 / temperature);
        }
        sum += p[s];
    }
    double entropy = 0;
    double first   = 0;
    double second  = 0;
    for (int s = 0; s < batch.n_used; ++s) {
        const double share = sum > 0 ? p[s] / sum : 1.0 / batch.n_used;
        if (share > 0) {
            entropy -= share * std::log(share);
        }
        second = std::max(second, std::min(first, share));
        first  = std::max(first, share);
    }
    return { batch.n_used > 1 ? std::min(entropy / std::log((double) batch.n_used), 1.0) : 0, first - second };
}

uint64_t mix(uint64_t x) { // splitmix64
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Chooses substitutes for the tokens of a batch, one after the other.
class Chooser {
public:
    Chooser(const pyorch_substitution & settings, const BuddyLists & lists, const RoutedBatch & batch,
        const uint8_t * resident) :
            settings(settings), lists(lists), batch(batch), resident(resident), taken(batch.n_expert),
            chosen(batch.n_expert) {}

    void begin(int token, const int32_t * experts) {
        t = token;
        std::fill(taken.begin(), taken.end(), 0);
        for (int s = 0; s < batch.n_used; ++s) {
            taken[experts[s]] = 1;
        }
    }

    // The substitute of an absent expert, and its rank in the list; -1 if there is none.
    int find(int expert, int & rank) const {
        return settings.mode == PYORCH_SUBSTITUTE_BUDDIES ? choose_buddy(expert, rank) :
            settings.mode == PYORCH_SUBSTITUTE_RANDOM     ? choose_random(expert) :
            settings.mode == PYORCH_SUBSTITUTE_CACHE      ? choose_ranked(expert) :
                                                            -1;
    }

    // It stands in for an expert of the token.
    void take(int substitute) {
        taken[substitute] = 1;
        ++chosen[substitute];
    }

private:
    const pyorch_substitution & settings;
    const BuddyLists &          lists;
    const RoutedBatch &         batch;
    const uint8_t *             resident;

    int                  t = 0;
    std::vector<uint8_t> taken;  // by this token
    std::vector<int>     chosen; // how often, in this batch

    bool free(int expert) const { return resident[expert] && !taken[expert]; }

    int choose_buddy(int expert, int & rank) const {
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
    double priority_of(int buddy, double q) const {
        double psi = q;
        if (settings.eta != 0) {
            const float * z    = batch.logits + (size_t) t * batch.n_expert;
            const auto    lim  = std::minmax_element(z, z + batch.n_expert);
            const double  low  = *lim.first;
            const double  span = *lim.second - low;
            psi *= 1 + settings.eta * (span > 0 ? (z[buddy] - low) / span : 0);
        }
        if (settings.kappa != 0) {
            psi *= 1 - settings.kappa * (lists.hops.empty() ? resident[buddy] == AT_PEER : lists.hops[buddy]);
        }
        return settings.reuse != 1 ? psi * std::pow(settings.reuse, chosen[buddy]) : psi;
    }

    // By what the router ranks an expert for this token: logits tell apart what gating rounds to the same probability.
    float score(int expert) const {
        const size_t at = (size_t) t * batch.n_expert + expert;
        return batch.selection_bias ? batch.probs[at] + batch.selection_bias[expert] : batch.logits[at];
    }

    // Of the free residents the one that the router ranks highest, if it is among so many and its logit is not too far
    // below that of the absent expert (max-rank routing; with a bonus, as if residents had so much more).
    int choose_ranked(int expert) const {
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

    // Uniform over the free residents. The number is drawn from what the router said, so it does not
    // depend on how tokens are batched.
    int choose_random(int expert) const {
        int n = 0;
        for (int id = 0; id < batch.n_expert; ++id) {
            n += free(id);
        }
        if (n == 0) {
            return -1;
        }
        uint32_t bits;
        memcpy(&bits, batch.probs + (size_t) t * batch.n_expert + expert, sizeof(bits));
        int nth =
            (int) (mix(mix(mix(settings.seed) ^ (uint64_t) batch.il) ^ ((uint64_t) bits << 32 | (uint64_t) expert)) %
                (uint64_t) n);
        for (int id = 0;; ++id) {
            if (free(id) && nth-- == 0) {
                return id;
            }
        }
    }
};

// What is expected to be missed of a slot's squared output, as a share of the layer's.
class Errors {
public:
    Errors(const pyorch_substitution & settings, const BuddyLists & lists, const GhostLayer * ghosts) :
            fitted(settings.mode == PYORCH_SUBSTITUTE_BUDDIES && settings.weight == PYORCH_WEIGHT_FITTED &&
                !lists.error.empty()),
            lists(lists), ghosts(ghosts) {}

    // With its ghost, or left out where it has none. share: of the token's weights. REQUIRES: ghosts
    double without_buddy(int expert, double share) const {
        return share * share * (ghosts->has(expert) ? ghosts->error_with(expert) : ghosts->error_without(expert));
    }

    // With the buddy of that rank; infinite where nobody knows. REQUIRES: ghosts
    double with_buddy(int expert, int rank, double share) const {
        const float left = fitted ? lists.error[(size_t) expert * lists.k_max + rank] : NAN;
        return std::isnan(left) ? std::numeric_limits<double>::infinity() :
                                  share * share * ghosts->error_without(expert) * left;
    }

private:
    const bool         fitted;
    const BuddyLists & lists;
    const GhostLayer * ghosts;
};

// The weights of a token whose experts were changed: slots that were dropped contribute nothing.
void reweigh(const pyorch_substitution & settings, const RoutedBatch & batch, int t, const int32_t * before,
    const std::vector<uint8_t> & dropped, const std::vector<double> & fitted) {
    int32_t * experts = batch.experts + (size_t) t * batch.n_used;
    float *   weights = batch.weights + (size_t) t * batch.n_used;

    const double offset = largest_logit(batch, t);
    const bool   own    = settings.weight == PYORCH_WEIGHT_OWN || settings.mode == PYORCH_SUBSTITUTE_CACHE;
    double       all    = 0;
    double       left   = 0;
    thread_local std::vector<double> w;
    w.resize(batch.n_used);
    for (int s = 0; s < batch.n_used; ++s) {
        all += weights[s];
        w[s] = weights[s];
        if (own && experts[s] != before[s]) {
            const double was = raw_weight(batch, t, before[s], offset);
            w[s] *= was > 0 ? raw_weight(batch, t, experts[s], offset) / was : 0;
        }
        if (dropped[s]) {
            w[s] = 0;
        }
        left += w[s];
    }
    const bool   any_dropped = std::find(dropped.begin(), dropped.end(), 1) != dropped.end();
    const double norm        = batch.normalized && (own || any_dropped) && left > 0 ? all / left : 1;
    for (int s = 0; s < batch.n_used; ++s) {
        weights[s] = (float) (w[s] * norm * fitted[s]);
    }
}

int count_absent(const RoutedBatch & batch, const uint8_t * resident, int & n_requested) {
    thread_local std::vector<uint8_t> requested;
    requested.assign(batch.n_expert, 0);
    auto ghost = batch.ghosts.begin();
    for (int i = 0; i < batch.n_tokens * batch.n_used; ++i) {
        if (ghost != batch.ghosts.end() && *ghost == i) {
            ++ghost;
        } else {
            requested[batch.experts[i]] = 1;
        }
    }
    int n_absent = 0;
    n_requested  = 0;
    for (int id = 0; id < batch.n_expert; ++id) {
        n_requested += requested[id];
        n_absent += requested[id] && !resident[id];
    }
    return n_absent;
}

} // namespace

pyorch_substitution default_substitution() {
    constexpr double    never    = std::numeric_limits<double>::infinity();
    pyorch_substitution settings = {};
    settings.struct_size         = sizeof(settings);
    settings.tau                 = -never;
    settings.temperature         = 1;
    settings.gamma               = never;
    settings.beta                = never;
    settings.reuse               = 1;
    settings.bonus               = never;
    settings.max_error           = never;
    return settings;
}

pyorch_substitution_counts substitute(const pyorch_substitution & settings, const BuddyLists & lists,
    const GhostLayer * ghosts, RoutedBatch & batch, const uint8_t * resident) {
    pyorch_substitution_counts counts = {};
    counts.tokens                     = batch.n_tokens;

    int       n_requested;
    const int n_absent = count_absent(batch, resident, n_requested);
    counts.absent      = n_absent;
    if (n_absent == 0) {
        return counts;
    }
    const bool crowded = (double) n_absent / n_requested >= settings.beta; // eq. 2

    Chooser              chooser(settings, lists, batch, resident);
    const Errors         errors(settings, lists, ghosts);
    const bool           automatic = settings.on_miss == PYORCH_MISS_AUTO && ghosts;
    std::vector<int32_t> before(batch.n_used);
    std::vector<uint8_t> dropped(batch.n_used);
    std::vector<double>  fitted(batch.n_used);
    std::vector<int>     order(batch.n_used);
    std::vector<int>     by_weight(batch.n_used);
    std::vector<uint8_t> sacred(batch.n_used);
    for (int t = 0; t < batch.n_tokens; ++t) {
        int32_t *     experts = batch.experts + (size_t) t * batch.n_used;
        const float * weights = batch.weights + (size_t) t * batch.n_used;

        before.assign(experts, experts + batch.n_used);
        const int missing = (int) std::count_if(before.begin(), before.end(), [&](int32_t e) { return !resident[e]; });
        if (missing == 0) {
            continue;
        }
        std::iota(order.begin(), order.end(), 0);
        if (settings.order == PYORCH_ORDER_WEIGHT || settings.sacred > 0) {
            // Of equal weights, the one that the router ranks lower is the lighter one.
            by_weight.assign(order.rbegin(), order.rend());
            std::stable_sort(by_weight.begin(), by_weight.end(), [&](int a, int b) { return weights[a] < weights[b]; });
        }
        std::fill(sacred.begin(), sacred.end(), 0);
        for (int i = 0; i < std::min(settings.sacred, batch.n_used); ++i) {
            sacred[by_weight[batch.n_used - 1 - i]] = 1;
        }
        if (settings.order == PYORCH_ORDER_WEIGHT) {
            order = by_weight;
        }
        if (automatic) {
            std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
                return errors.without_buddy(before[a], weights[a]) < errors.without_buddy(before[b], weights[b]);
            });
        }
        std::fill(dropped.begin(), dropped.end(), 0);
        std::fill(fitted.begin(), fitted.end(), 1);
        int          n_substituted = 0;
        int          n_dropped     = 0;
        int          n_ghosts      = 0;
        double       error         = 0; // expected, automatic
        const int    n_earlier     = batch.changed ? batch.changed[t] : 0;
        const double total         = std::accumulate(weights, weights + batch.n_used, 0.0);

        const Sensitivity it = sensitivity(batch, t, experts, settings.temperature);
        if (it.entropy <= settings.tau) {
            counts.refused_tae += missing;
        } else if (it.margin >= settings.gamma) {
            counts.refused_margin += missing;
        } else if (crowded) {
            counts.refused_distribution += missing;
        } else {
            chooser.begin(t, experts);
            for (int s : order) {
                if (resident[before[s]]) {
                    continue;
                }
                if (sacred[s]) {
                    ++counts.refused_sacred;
                    continue;
                }
                const int n_changed = n_substituted + n_dropped + n_ghosts;
                if ((settings.max_per_token > 0 && n_changed == settings.max_per_token) ||
                    (settings.max_all_layers > 0 && n_changed + n_earlier >= settings.max_all_layers)) {
                    ++counts.refused_rho;
                    continue;
                }
                int rank   = 0;
                int chosen = chooser.find(before[s], rank);
                if (automatic) {
                    const double share   = total > 0 ? weights[s] / total : 1.0 / batch.n_used;
                    const double without = errors.without_buddy(before[s], share);
                    const double with    = chosen >= 0 ? errors.with_buddy(before[s], rank, share) : without;
                    if (error + std::min(with, without) > settings.max_error) {
                        ++counts.refused_error;
                        continue;
                    }
                    error += std::min(with, without);
                    chosen = with < without ? chosen : -1;
                }
                if (chosen < 0) {
                    ++counts.refused_buddies;
                    if (ghosts && settings.on_miss >= PYORCH_MISS_GHOST && ghosts->has(before[s])) {
                        batch.ghosts.push_back(t * batch.n_used + s);
                        batch.deferred.push_back(before[s]);
                        ++n_ghosts;
                    } else if (settings.on_miss == PYORCH_MISS_DROP ||
                        (ghosts && settings.on_miss >= PYORCH_MISS_GHOST)) {
                        dropped[s] = 1;
                        batch.deferred.push_back(before[s]);
                        ++n_dropped;
                    }
                    continue;
                }
                chooser.take(chosen);
                experts[s] = chosen;
                batch.deferred.push_back(before[s]);
                ++n_substituted;
                counts.rank_sum += rank;
                if (settings.weight == PYORCH_WEIGHT_FITTED && settings.mode == PYORCH_SUBSTITUTE_BUDDIES &&
                    !lists.scale.empty()) {
                    const float scale = lists.scale[(size_t) before[s] * lists.k_max + rank];
                    fitted[s]         = std::isnan(scale) ? 1 : scale;
                }
            }
        }
        counts.substituted += n_substituted;

        if (n_dropped > 0) {
            // A dropped slot names something that is there, with weight 0: it might be computed.
            int stand_in = -1;
            for (int s = 0; s < batch.n_used && stand_in < 0; ++s) {
                stand_in = resident[experts[s]] ? experts[s] : -1;
            }
            for (int id = 0; id < batch.n_expert && stand_in < 0; ++id) {
                stand_in = resident[id] ? id : -1;
            }
            for (int s = 0; s < batch.n_used; ++s) {
                if (dropped[s]) {
                    experts[s] = stand_in >= 0 ? stand_in : experts[s];
                    batch.dropped.push_back(t * batch.n_used + s);
                }
            }
        }
        counts.dropped += n_dropped;
        counts.ghosts += n_ghosts;
        std::sort(batch.ghosts.end() - n_ghosts, batch.ghosts.end());
        if (batch.changed) {
            batch.changed[t] += n_substituted + n_dropped + n_ghosts;
        }
        if (n_substituted > 0 || n_dropped > 0 || n_ghosts > 0) {
            ++counts.lossy_tokens;
            reweigh(settings, batch, t, before.data(), dropped, fitted);
        }
    }
    std::sort(batch.deferred.begin(), batch.deferred.end());
    batch.deferred.erase(std::unique(batch.deferred.begin(), batch.deferred.end()), batch.deferred.end());
    counts.avoided = n_absent - count_absent(batch, resident, n_requested);
    return counts;
}

void add(pyorch_substitution_counts & to, const pyorch_substitution_counts & from) {
    to.tokens += from.tokens;
    to.lossy_tokens += from.lossy_tokens;
    to.substituted += from.substituted;
    to.dropped += from.dropped;
    to.refused_tae += from.refused_tae;
    to.refused_margin += from.refused_margin;
    to.refused_distribution += from.refused_distribution;
    to.refused_rho += from.refused_rho;
    to.refused_buddies += from.refused_buddies;
    to.rank_sum += from.rank_sum;
    to.absent += from.absent;
    to.avoided += from.avoided;
    to.refused_sacred += from.refused_sacred;
    to.ghosts += from.ghosts;
    to.refused_error += from.refused_error;
    to.on_their_way += from.on_their_way;
}

void BetaController::passed(double bytes_to_read, double budget_bytes) {
    // Slow against one token's luck, quick against a change of subject.
    static constexpr double FADE = 0.05;
    static constexpr double STEP = 0.01;
    average += FADE * (bytes_to_read - average);
    // Above 1 the gate is open for any share.
    value = std::clamp(value + (average > budget_bytes ? STEP : -STEP), 0.0, 1.0 + STEP);
}

void Substitutions::set(int layer, const pyorch_substitution & settings) {
    std::lock_guard<std::mutex> lock(mutex);
    Layer &                     l = layers[layer];
    l.settings                    = settings;
    l.controller                  = {};
    const bool off                = settings.mode == PYORCH_SUBSTITUTE_NONE && settings.on_miss == PYORCH_MISS_FETCH;
    l.active.store(off ? NEVER : settings.prefill ? ALWAYS : DECODE, std::memory_order_relaxed);
}

void Substitutions::set_buddies(int layer, BuddyLists lists) {
    std::lock_guard<std::mutex> lock(mutex);
    layers[layer].lists = std::move(lists);
}

bool Substitutions::set_buddy_errors(int layer, int k_max, std::vector<float> errors) {
    std::lock_guard<std::mutex> lock(mutex);
    BuddyLists &                lists = layers[layer].lists;
    const bool                  fit   = lists.k_max == k_max && lists.ids.size() == errors.size();
    if (fit) {
        lists.error = std::move(errors);
    }
    return fit;
}

void Substitutions::set_ghosts(int layer, std::shared_ptr<const GhostLayer> ghosts) {
    std::lock_guard<std::mutex> lock(mutex);
    layers[layer].ghosts = std::move(ghosts);
}

std::shared_ptr<const GhostLayer> Substitutions::ghosts(int layer) {
    std::lock_guard<std::mutex> lock(mutex);
    return layers[layer].ghosts;
}

void Substitutions::set_cache(int layer, std::vector<uint8_t> mask) {
    std::lock_guard<std::mutex> lock(mutex);
    layers[layer].cache = std::move(mask);
}

// Slots that were not waited for, whose experts were being read meanwhile: a moment later they would have been there.
static uint64_t count_on_their_way(const RoutedBatch & batch, const uint8_t * loading) {
    uint64_t n     = 0;
    auto     ghost = batch.ghosts.begin();
    for (int s = 0; s < batch.n_tokens * batch.n_used; ++s) {
        const bool is_ghost = ghost != batch.ghosts.end() && *ghost == s;
        ghost += is_ghost;
        n += (is_ghost || batch.experts[s] != batch.requested[s]) && loading[batch.requested[s]];
    }
    return n;
}

void Substitutions::apply(RoutedBatch & batch, const uint8_t * resident, const uint8_t * loading, uint64_t slot_bytes,
    double read_bytes_per_second) {
    std::lock_guard<std::mutex> lock(mutex);
    Layer &                     l        = layers[batch.layer];
    pyorch_substitution         settings = l.settings;
    if (settings.read_ms > 0) {
        settings.beta = l.controller.beta();
    }
    // A router may see something else than its experts.
    batch.ghost_layer          = l.ghosts && l.ghosts->n_in == batch.n_embd ? l.ghosts : nullptr;
    const uint8_t *      cache = l.cache.empty() ? resident : l.cache.data();
    std::vector<uint8_t> there(cache, cache + batch.n_expert);
    for (int id = 0; id < (int) batch.guessed.size(); ++id) {
        there[id] = there[id] ? there[id] : batch.guessed[id] ? HERE : ABSENT;
    }
    pyorch_substitution_counts counts = substitute(settings, l.lists, batch.ghost_layer.get(), batch, there.data());
    counts.on_their_way               = l.cache.empty() ? count_on_their_way(batch, loading) : 0;
    if (settings.read_ms > 0) {
        l.controller.passed((double) (counts.absent - counts.avoided) * slot_bytes,
            settings.read_ms / 1000 * read_bytes_per_second / layers.size());
    }
    add(l.counts, counts);
}

pyorch_substitution_counts Substitutions::preview(RoutedBatch & batch, const uint8_t * resident) {
    std::lock_guard<std::mutex> lock(mutex);
    const Layer &               l = layers[batch.layer];
    return substitute(l.settings, l.lists, l.ghosts.get(), batch, resident);
}

pyorch_substitution_counts Substitutions::counts(int layer) {
    std::lock_guard<std::mutex> lock(mutex);
    return layers[layer].counts;
}

void Substitutions::reset_counts() {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto & l : layers) {
        l.counts = {};
    }
}

} // namespace pyorch
