#include "api/api.h"

#include <utility>

using namespace pyorch;

extern "C" {

pyorch_status pyorch_history_new(int32_t n_layers, int32_t n_expert, int32_t n_embd, int32_t capacity, int32_t distance,
    int32_t n_requests, pyorch_history ** history) {
    return guarded([&] {
        if (n_layers < 1 || n_expert < 1 || n_embd < 0) {
            throw Failure(PYORCH_INVALID,
                format("there are no expert maps of %d layers of %d experts with embeddings of %d numbers", n_layers,
                    n_expert, n_embd));
        }
        for (auto [what, value] : { std::pair("capacity", capacity), std::pair("prefetch distance", distance),
                 std::pair("number of requests", n_requests) }) {
            if (value < 1) {
                throw Failure(PYORCH_INVALID, format("the %s of expert maps is at least 1, not %d", what, value));
            }
        }
        *history = new pyorch_history{
            std::make_shared<ExpertMaps>(n_layers, n_expert, n_embd, capacity, distance, n_requests),
        };
    });
}

void pyorch_history_free(pyorch_history * history) { delete history; }

pyorch_status pyorch_set_history(pyorch_engine * engine, pyorch_history * history) {
    return guarded_outside_callbacks(__func__, [&] {
        const auto & layers = engine->table.map.layers;
        for (const auto & layer : layers) {
            if (history && history->store->iterations.n_expert < layer.n_expert) {
                throw Failure(PYORCH_INVALID,
                    format("layer %d has %d experts, the expert maps %d", layer.il, layer.n_expert,
                        history->store->iterations.n_expert));
            }
        }
        if (history && history->store->iterations.n_layers > (int) layers.size()) {
            throw Failure(PYORCH_INVALID,
                format("the model has %zu layers with routed experts, the expert maps %d", layers.size(),
                    history->store->iterations.n_layers));
        }
        engine->prefetcher.change(
            [&](PrefetchPlanner & planner) { planner.set_maps(history ? history->store : nullptr); });
    });
}

pyorch_status pyorch_history_add_map(pyorch_history * history, const float * embedding, const float * map) {
    return guarded([&] {
        if (!history->store->iterations.add(embedding, map)) {
            throw Failure(PYORCH_INVALID, "an expert map, or its embedding, has a value that is not a finite number");
        }
    });
}

pyorch_status pyorch_history_add_request(pyorch_history * history, const float * counts) {
    return guarded([&] {
        if (!history->store->requests.add(counts)) {
            throw Failure(PYORCH_INVALID, "the counts of a request are finite numbers of 0 or more, and not all 0");
        }
    });
}

pyorch_status pyorch_history_size(const pyorch_history * history, int32_t * n_maps, int32_t * n_requests) {
    return guarded([&] {
        *n_maps     = history->store->iterations.size();
        *n_requests = history->store->requests.size();
    });
}

pyorch_status pyorch_history_export(const pyorch_history * history, float * embeddings, float * probs, int32_t * n_maps,
    float * requests, int32_t * n_requests) {
    return guarded([&] {
        *n_maps     = history->store->iterations.copy_to(embeddings, probs, *n_maps);
        *n_requests = history->store->requests.copy_to(requests, *n_requests);
    });
}

} // extern "C"
