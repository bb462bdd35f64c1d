#include "routing/substitution.h"

#include "base/counters.h"
#include "routing/substitute/account.h"
#include "routing/substitute/gates.h"
#include "routing/substitute/order.h"

#include <algorithm>
#include <cmath>
#include <limits>

const pyorch_substitution pyorch_default_substitution = [] {
    constexpr double    never    = std::numeric_limits<double>::infinity();
    pyorch_substitution settings = {};
    settings.tau                 = -never;
    settings.temperature         = 1;
    settings.gamma               = never;
    settings.beta                = never;
    settings.reuse               = 1;
    settings.bonus               = never;
    settings.max_weight          = never;
    return settings;
}();

namespace pyorch {

pyorch_substitution_counts substitute(const pyorch_substitution & settings, double mean_weight,
    const BuddyLists & lists, const GhostLayer * ghosts, RoutedBatch & batch, const uint8_t * resident) {
    const Requested            requested = count_requested(batch, resident);
    pyorch_substitution_counts counts    = {};
    counts.tokens                        = batch.n_tokens;
    counts.absent                        = requested.n_absent;
    if (requested.n_absent == 0) {
        return counts;
    }
    const Gates gates(settings, batch, requested);
    SlotOrder   order(settings, settings.max_weight * mean_weight, batch.n_used);
    Chooser     chooser(settings, lists, batch, resident);
    Account     token(settings, ghosts, batch, resident, counts);
    for (int t = 0; t < batch.n_tokens; ++t) {
        const int missing = token.begin(t);
        if (missing == 0) {
            continue;
        }
        if (const Refusal refused = gates.refuses_token(t, token.experts())) {
            counts.*refused += missing;
            continue;
        }
        chooser.begin(t, token.experts());
        for (int s : order.of(token.weights())) {
            const int expert = token.experts()[s];
            if (resident[expert]) {
                continue;
            }
            const Refusal refused = order.is_sacred(s) ? &pyorch_substitution_counts::refused_sacred :
                                                         gates.refuses_slot(token.n_changed(), token.n_earlier());
            if (refused) {
                ++(counts.*refused);
                continue;
            }
            int       rank;
            const int chosen = chooser.find(expert, rank);
            if (chosen < 0) {
                token.find_no_buddy(s);
                continue;
            }
            chooser.take(chosen);
            token.substitute(s, chosen, rank);
        }
        token.end();
    }
    std::sort(batch.deferred.begin(), batch.deferred.end());
    batch.deferred.erase(std::unique(batch.deferred.begin(), batch.deferred.end()), batch.deferred.end());
    counts.avoided = requested.n_absent - count_requested(batch, resident).n_absent;
    return counts;
}

double AdaptiveBeta::next(double bytes_read, double budget) {
    static constexpr double MEMORY = 20; // ubatches: longer than the noise of a token, shorter than a change of subject
    static constexpr double STEP   = 0.01;
    n_ubatches                     = std::min(n_ubatches + 1, MEMORY);
    mean_bytes += (bytes_read - mean_bytes) / n_ubatches;
    beta = std::clamp(beta + (mean_bytes > budget ? STEP : -STEP), 0.0, 1 + STEP); // above 1 the gate is always open
    return beta;
}

void Substitutions::set(int layer, const pyorch_substitution & settings) {
    MutexLock lock(mutex);
    Layer &   l = layers[layer];
    l.settings  = settings;
    l.adaptive  = {};
    if (settings.read_budget > 0) {
        l.settings.beta = 0;
    }
    mean_weight    = {};
    const bool off = settings.mode == PYORCH_SUBSTITUTE_NONE && settings.on_miss == PYORCH_MISS_FETCH;
    modes[layer].store(off ? NEVER : settings.prefill ? ALWAYS : DECODE, std::memory_order_relaxed);
}

void Substitutions::set_buddies(int layer, BuddyLists lists) {
    MutexLock lock(mutex);
    layers[layer].lists = std::move(lists);
}

void Substitutions::set_ghosts(int layer, std::shared_ptr<const GhostLayer> ghosts) {
    MutexLock lock(mutex);
    layers[layer].ghosts = std::move(ghosts);
}

std::shared_ptr<const GhostLayer> Substitutions::ghosts(int layer) {
    MutexLock lock(mutex);
    return layers[layer].ghosts;
}

void Substitutions::set_cache(int layer, std::vector<uint8_t> mask) {
    MutexLock lock(mutex);
    layers[layer].cache = std::move(mask);
}

void Substitutions::MeanWeight::add(const RoutedBatch & batch) {
    const size_t n_slots = (size_t) batch.n_tokens * batch.n_used;
    for (size_t s = 0; s < n_slots; ++s) {
        if (std::isfinite(batch.requested_weights[s])) { // a single NaN would stay in the mean for ever
            sum += batch.requested_weights[s];
            ++n;
        }
    }
}

// Counts slots that did not wait although their experts were loading: a moment later they would have been resident.
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

static Substitutions::Seen seen_by(const pyorch_substitution & settings) {
    const bool ranks = settings.mode == PYORCH_SUBSTITUTE_CACHE;
    return { has_sensitivity_gates(settings) || ranks || settings.mode == PYORCH_SUBSTITUTE_RANDOM,
        ranks || (settings.mode == PYORCH_SUBSTITUTE_BUDDIES && settings.eta != 0),
        settings.on_miss == PYORCH_MISS_GHOST };
}

Substitutions::Seen Substitutions::seen() const {
    MutexLock lock(mutex);
    Seen      seen;
    for (size_t layer = 0; layer < layers.size(); ++layer) {
        const Seen its = modes[layer] == NEVER ? Seen() : seen_by(layers[layer].settings);
        seen           = { seen.probs || its.probs, seen.logits || its.logits, seen.inputs || its.inputs };
    }
    return seen;
}

void Substitutions::apply(
    RoutedBatch & batch, const uint8_t * resident, const uint8_t * loading, uint64_t expert_bytes) {
    MutexLock  lock(mutex);
    Layer &    l    = layers[batch.layer];
    const Seen seen = seen_by(l.settings);
    if ((seen.probs && !batch.probs) || (seen.logits && !batch.logits) ||
        (seen.inputs && !(batch.inputs && batch.has(GRAPH_GHOSTS)))) {
        return;
    }
    // A router's input may differ from the experts' input.
    batch.ghost_layer          = l.ghosts && l.ghosts->n_in == batch.n_embd ? l.ghosts : nullptr;
    const uint8_t *      cache = l.cache.empty() ? resident : l.cache.data();
    std::vector<uint8_t> there(cache, cache + batch.n_expert);
    for (int id = 0; id < (int) batch.guessed.size(); ++id) {
        there[id] = there[id] || !batch.guessed[id] ? there[id] : 1 + batch.on_device();
    }
    mean_weight.add(batch);
    pyorch_substitution_counts counts =
        substitute(l.settings, mean_weight.value(), l.lists, batch.ghost_layer.get(), batch, there.data());
    counts.on_their_way = l.cache.empty() ? count_on_their_way(batch, loading) : 0;
    add_counts(l.counts, counts);
    if (l.settings.read_budget > 0) {
        const double bytes_read = (double) (counts.absent - counts.avoided) * (double) expert_bytes;
        l.settings.beta         = l.adaptive.next(bytes_read, l.settings.read_budget / (double) layers.size());
    }
}

pyorch_substitution_counts Substitutions::preview(RoutedBatch & batch, const uint8_t * resident) {
    MutexLock     lock(mutex);
    const Layer & l      = layers[batch.layer];
    MeanWeight    weight = mean_weight;
    weight.add(batch);
    return substitute(l.settings, weight.value(), l.lists, l.ghosts.get(), batch, resident);
}

pyorch_substitution_counts Substitutions::counts(int layer) {
    MutexLock lock(mutex);
    return layers[layer].counts;
}

void Substitutions::reset_counts() {
    MutexLock lock(mutex);
    for (auto & l : layers) {
        l.counts = {};
    }
}

} // namespace pyorch
