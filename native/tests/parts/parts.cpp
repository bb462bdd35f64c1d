// Parts of an engine, asked by themselves: what tests/parts.py calls. A library of its own, beside libpyorch.

#include "api/api.h"
#include "base/cpu_backend.h"
#include "prediction/estimator.h"
#include "device/slot_pools.h"

#include <algorithm>
#include <numeric>

using namespace pyorch;

namespace {

std::shared_ptr<const Estimator> estimator_of(pyorch_engine * engine) {
    std::shared_ptr<const Estimator> estimator;
    engine->prefetcher.change([&](PrefetchPlanner & planner) { estimator = planner.estimator(); });
    return estimator;
}

// What tables decide, told by what is where after each step. It asks for nothing but that, so the tables may decide in
// whichever way.
class Decisions {
public:
    Decisions(const ModelMap & map, const std::vector<int64_t> & changes) : map(map), changes(changes) {
        for (auto & tier : places) {
            for (const MoeLayer & layer : map.layers) {
                tier.emplace_back(layer.n_expert);
            }
        }
    }

    const std::vector<int32_t> & look(
        int32_t ubatch, int layer, Table & table, const Owner & owner, SlotPools * device) {
        rows.clear();
        while (layer < 0 && at < changes.size() && changes[at] == ubatch) {
            change(&changes[at + 1], table, device);
            at += 5;
        }
        for (int of = 0; of < (int) map.layers.size(); ++of) {
            std::vector<uint8_t> resident, loading;
            table.resident(of, resident, &loading);
            const Stream * stream = owner.stream && owner.stream->layer == of ? owner.stream : nullptr;
            for (int expert = 0; expert < map.layers[of].n_expert; ++expert) {
                const bool passes = stream && stream->place_of[expert] >= 0;
                note(ubatch, layer, 0, of, expert, passes ? 2 : resident[expert] || loading[expert]);
                if (device) {
                    note(ubatch, layer, 1, of, expert,
                        device->is_ordered(of, expert)       ? 3 :
                            device->is_transient(of, expert) ? 2 :
                                                               device->known(of, expert));
                }
            }
        }
        return rows;
    }

private:
    const ModelMap &                  map;
    const std::vector<int64_t>        changes;
    size_t                            at = 0;
    std::vector<std::vector<uint8_t>> places[2]; // by tier, layer and expert
    std::vector<int32_t>              rows;

    void note(int32_t ubatch, int layer, int tier, int of, int expert, int place) {
        if (places[tier][of][expert] != place) {
            places[tier][of][expert] = (uint8_t) place;
            rows.insert(rows.end(), { ubatch, layer, tier, of, expert, place });
        }
    }

    void change(const int64_t * what, Table & table, SlotPools * device) const {
        const int     layer = (int) what[1];
        const int32_t il    = map.layers[layer].il;
        const auto    a = (int32_t) what[2], b = (int32_t) what[3];
        switch (what[0]) {
        case 0: return table.set_budget((uint64_t) what[2]);
        case 1: return table.pin(il, &a, 1);
        case 2: return table.unpin(il, &a, 1);
        case 3: return table.set_limits(layer, a, b);
        case 4: return device->set_limits(layer, a, b);
        default: warm(layer, a, b, table, device);
        }
    }

    // As a start with warm memory has it: from a to b, in both tiers.
    void warm(int layer, int32_t a, int32_t b, Table & table, SlotPools * device) const {
        std::vector<int> experts(b - a);
        std::iota(experts.begin(), experts.end(), a);
        table.prefetch(map.layers[layer].il, experts.data(), (int) experts.size());
        for (int expert : device ? device->fill(layer, experts) : std::vector<int>()) {
            device->arrived(layer, expert);
        }
    }
};

} // namespace

extern "C" {

// What the router selects for inputs [n_tokens][n_embd], as predictors apply it: experts and weights
// [n_tokens][n_used], the best first.
pyorch_status parts_apply_router(
    pyorch_engine * engine, int32_t il, const float * inputs, int32_t n_tokens, int32_t * experts, float * weights) {
    return guarded([&] {
        const Router       r   = engine->routers.all()[engine->table.layer_index(il)];
        const auto         dot = cpu_backend().type_traits(GGML_TYPE_F32)->vec_dot;
        std::vector<float> logits(r.n_expert);
        for (int t = 0; t < n_tokens; ++t) {
            for (int e = 0; e < r.n_expert; ++e) {
                dot(r.n_embd, &logits[e], 0, r.gate + (size_t) e * r.n_embd, 0, inputs + (size_t) t * r.n_embd, 0, 1);
                logits[e] += r.bias ? r.bias[e] : 0;
            }
            const Choice choice = choose(r, logits, r.n_used);
            std::copy(choice.experts.begin(), choice.experts.end(), experts + (size_t) t * r.n_used);
            std::copy(choice.weights.begin(), choice.weights.end(), weights + (size_t) t * r.n_used);
        }
    });
}

// What the estimator adds to the logits of the layer after il, for the quasi-hidden state[n_embd] of il.
pyorch_status parts_estimate(
    pyorch_engine * engine, int32_t il, const float * state, int32_t n_embd, float * logits, int32_t n_expert) {
    return guarded([&] {
        const int  layer     = engine->table.layer_index(il);
        const auto estimator = estimator_of(engine);
        if (!estimator || layer >= estimator->n_layers || n_embd != estimator->n_embd ||
            n_expert != estimator->n_expert) {
            throw Failure(PYORCH_INVALID,
                format("there is no estimator for layer %d with states of %d values and %d experts", il, n_embd,
                    n_expert));
        }
        std::fill(logits, logits + n_expert, 0.0f);
        estimator->correct(layer, { CompactVector(state, n_embd) }, logits);
    });
}

// What ghosts give: outputs[n][n_out] for inputs[n][n_in] of experts[n]. PYORCH_INVALID for one that has none.
pyorch_status parts_apply_ghosts(
    pyorch_engine * engine, int32_t il, const float * inputs, const int32_t * experts, int32_t n, float * outputs) {
    return guarded([&] {
        const auto ghosts = engine->routing.substitutions.ghosts(engine->table.layer_index(il));
        for (int i = 0; i < n; ++i) {
            if (!ghosts || experts[i] < 0 || experts[i] >= ghosts->n_expert || !ghosts->has(experts[i])) {
                throw Failure(PYORCH_INVALID, format("expert %d of layer %d has no ghost", experts[i], il));
            }
        }
        std::vector<int> slots(n);
        std::iota(slots.begin(), slots.end(), 0);
        for (const GhostJob & job : ghost_jobs(*ghosts, experts, slots)) {
            std::vector<const float *> from;
            std::vector<float *>       to;
            for (int slot : job.slots) {
                from.push_back(inputs + (size_t) slot * ghosts->n_in);
                to.push_back(outputs + (size_t) slot * ghosts->n_out);
            }
            ghosts->compute(job.expert, from, to);
        }
    });
}

// What substitution would make of a routing while the experts of resident[n_expert] are there; changes and counts
// nothing but experts and weights. A slot that a ghost computes keeps both. normalized, softmax_selected: how the model
// makes weights of probs (see RoutedBatch).
pyorch_status parts_substitute(pyorch_engine * engine, const pyorch_routing * routing, const uint8_t * resident,
    int32_t normalized, int32_t softmax_selected, int32_t * experts, float * weights,
    pyorch_substitution_counts * counts) {
    return guarded([&] {
        const int    layer   = engine->table.layer_index(routing->il);
        const size_t n_slots = (size_t) routing->n_tokens * routing->n_expert_used;
        check_experts(engine, layer, routing->n_expert);
        std::copy(routing->experts, routing->experts + n_slots, experts);
        std::copy(routing->weights, routing->weights + n_slots, weights);
        RoutedBatch batch       = {};
        batch.layer             = layer;
        batch.il                = routing->il;
        batch.n_tokens          = routing->n_tokens;
        batch.n_expert          = routing->n_expert;
        batch.n_used            = routing->n_expert_used;
        batch.requested         = routing->experts;
        batch.requested_weights = routing->weights;
        batch.probs             = routing->probs;
        batch.logits            = routing->logits;
        batch.normalized        = normalized != 0;
        batch.softmax_selected  = softmax_selected != 0;
        batch.experts           = experts;
        batch.weights           = weights;
        *counts                 = engine->routing.substitutions.preview(batch, resident);
    });
}

// What was predicted for one token when layer il_from was routed (-1: when the ubatch began): experts of layer il, the
// likeliest first. Called on the prefetching thread; on return no call of the one before is running.
pyorch_status parts_set_prediction_observer(pyorch_engine * engine,
    void (*observer)(const void * context, int32_t il_from, int32_t il, const int32_t * experts, int32_t n)) {
    return guarded_outside_callbacks(__func__, [&] {
        PrefetchPlanner::Observer shown;
        if (observer) {
            shown = [=](const void * context, int from, const Forecast & new_forecast) {
                const auto &               layers = engine->table.map.layers;
                const std::vector<int32_t> experts(new_forecast.experts.begin(), new_forecast.experts.end());
                CallbackScope              scope;
                observer(context, from < 0 ? -1 : layers[from].il, layers[new_forecast.layer].il, experts.data(),
                    (int32_t) experts.size());
            };
        }
        engine->prefetcher.change([&](PrefetchPlanner & planner) { planner.set_observer(std::move(shown)); });
    });
}

// From now on replays on a simulated engine tell decided(rows[n][6], n) who came and who left, and play the changes.
// A row: ubatch, layer that is played, tier (0: host, 1: device), layer, expert, and its place since then (0: none,
// 1: there or coming, 2: passes through, 3: an ordered expert). A change: before this ubatch, what (see change()), layer, two numbers.
pyorch_status parts_watch_replay(
    pyorch_engine * engine, const int64_t * changes, int64_t n, void (*decided)(const int32_t * rows, int64_t n)) {
    return guarded([&] {
        auto decisions = std::make_shared<Decisions>(engine->table.map, std::vector<int64_t>(changes, changes + 5 * n));
        engine->watch  = [=](int64_t ubatch, int layer, Table & table, const Owner & owner, SlotPools * device) {
            const std::vector<int32_t> & rows = decisions->look((int32_t) ubatch, layer, table, owner, device);
            if (!rows.empty()) {
                decided(rows.data(), (int64_t) rows.size() / 6);
            }
        };
    });
}

// The most alike iteration, and its cosine: by embedding where n_known is 0, else by the first n_known layers of map.
// index -1: there is none.
void parts_search_map(const pyorch_history * history, const float * embedding, const float * map, int32_t n_known,
    int32_t * index, float * score) {
    auto &          store = *history->store;
    ExpertMapSearch search(store);
    Match           match = search.begin(embedding);
    for (int l = 0; l < n_known; ++l) {
        match = search.observe(map + (size_t) l * store.n_expert, store.n_expert);
    }
    *index = match.index;
    *score = match.score;
}

} // extern "C"
