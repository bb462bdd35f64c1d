#include "api/api.h"

#include <utility>

using namespace pyorch;

extern "C" {

pyorch_status pyorch_history_new(
    int32_t n_layers, int32_t n_expert, int32_t n_embd, int32_t capacity, int32_t distance, pyorch_history ** history) {
    return guarded([&] {
        if (n_layers < 1 || n_expert < 1 || n_embd < 0) {
            throw Failure(PYORCH_INVALID,
                format("there are no expert maps of %d layers of %d experts with embeddings of %d numbers", n_layers,
                    n_expert, n_embd));
        }
        for (auto [what, value] : { std::pair("capacity", capacity), std::pair("prefetch distance", distance) }) {
            if (value < 1) {
                throw Failure(PYORCH_INVALID, format("the %s of expert maps is at least 1, not %d", what, value));
            }
        }
        *history = new pyorch_history{
            std::make_shared<ExpertMapStore>(n_layers, n_expert, n_embd, capacity, distance),
        };
    });
}

void pyorch_history_free(pyorch_history * history) { delete history; }

pyorch_status pyorch_set_history(pyorch_engine * engine, pyorch_history * history) {
    return guarded_outside_callbacks(__func__, [&] {
        const auto & layers = engine->table.map.layers;
        for (const auto & layer : layers) {
            if (history && history->store->n_expert < layer.n_expert) {
                throw Failure(PYORCH_INVALID,
                    format("layer %d has %d experts, the expert maps %d", layer.il, layer.n_expert,
                        history->store->n_expert));
            }
        }
        if (history && history->store->n_layers > (int) layers.size()) {
            throw Failure(PYORCH_INVALID,
                format("the model has %zu layers with routed experts, the expert maps %d", layers.size(),
                    history->store->n_layers));
        }
        engine->prefetcher.change(
            [&](PrefetchPlanner & planner) { planner.change_model().maps = history ? history->store : nullptr; });
    });
}

pyorch_status pyorch_history_add_map(pyorch_history * history, const float * embedding, const float * map) {
    return guarded([&] {
        if (!history->store->add(embedding, map)) {
            throw Failure(PYORCH_INVALID, "an expert map, or its embedding, has a value that is not a finite number");
        }
    });
}

pyorch_status pyorch_history_size(const pyorch_history * history, int32_t * n_maps) {
    return guarded([&] { *n_maps = history->store->size(); });
}

pyorch_status pyorch_history_export(
    const pyorch_history * history, float * embeddings, float * probs, int32_t * n_maps) {
    return guarded([&] { *n_maps = history->store->copy_to(embeddings, probs, *n_maps); });
}

} // extern "C"
