#include "api/api.h"
#include "api/handles.h"
#include "prediction/estimator.h"

#include <algorithm>

namespace pyorch {
namespace {

LayerPrefetch layer_prefetch(pyorch_engine * engine, int32_t predictor, int32_t distance, double min_precision) {
    if (predictor < PYORCH_PREDICT_NONE || predictor > (engine->simulated ? PYORCH_PREDICT_ORACLE : PYORCH_PREDICT_EXPERT_MAP)) {
        throw Failure(PYORCH_INVALID, predictor == PYORCH_PREDICT_ORACLE ? "the oracle needs to know the future: only a replay does" :
            format("unknown predictor %d", predictor));
    }
    const int n_layers = (int) engine->table.map.layers.size();
    if (distance < 1 || distance > n_layers || !(min_precision >= 0 && min_precision <= 1)) {
        throw Failure(PYORCH_INVALID, format("a prefetch needs a distance from 1 to %d and a precision from 0 to 1, not %d and %g",
            n_layers, distance, min_precision));
    }
    return { (pyorch_predictor) predictor, distance, min_precision };
}

} // namespace
} // namespace pyorch

using namespace pyorch;

extern "C" {

pyorch_status pyorch_set_prefetch(pyorch_engine * engine, int32_t predictor, int32_t distance, double min_precision, int32_t automatic) {
    return guarded([&] {
        const auto prefetch = layer_prefetch(engine, predictor, distance, min_precision);
        engine->prefetcher.set_automatic(automatic != 0);
        engine->prefetcher.change([&](PrefetchPlanner & planner) {
            for (int layer = 0; layer < (int) engine->table.map.layers.size(); ++layer) {
                planner.set(layer, prefetch);
            }
        });
    });
}

pyorch_status pyorch_set_layer_prefetch(pyorch_engine * engine, int32_t il, int32_t predictor, int32_t distance, double min_precision) {
    return guarded([&] {
        const auto prefetch = layer_prefetch(engine, predictor, distance, min_precision);
        const int  layer    = engine->table.layer_index(il);
        engine->prefetcher.change([&](PrefetchPlanner & planner) { planner.set(layer, prefetch); });
    });
}

pyorch_status pyorch_set_router(pyorch_engine * engine, int32_t il, const pyorch_router * router) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, router->n_expert);
        if (!engine->simulated) {
            throw Failure(PYORCH_INVALID, "routers are set for simulated engines: others have those of the model");
        }
        engine->set_router(layer, *router);
    });
}

pyorch_status pyorch_get_router(pyorch_engine * engine, int32_t il, pyorch_router * router) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        std::lock_guard<std::mutex> lock(engine->routers_mutex);
        const auto & it = engine->routers[layer];
        if (!it) {
            throw Failure(PYORCH_INVALID, format("the router of layer %d is not known", il));
        }
        *router = { it.n_expert, it.n_embd, it.gate, it.bias, it.norm, it.eps, it.choice, it.sigmoid };
    });
}

pyorch_status pyorch_set_default_vectors(pyorch_engine * engine, int32_t il, const float * vectors, int32_t n_expert, int32_t n_embd) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, n_expert);
        std::vector<float> copy(vectors, vectors + (size_t) n_expert * n_embd);
        engine->prefetcher.change([&](PrefetchPlanner & planner) { planner.set_default_vectors(layer, std::move(copy)); });
    });
}

pyorch_status pyorch_set_estimator(pyorch_engine * engine, const pyorch_estimator * estimator) {
    return guarded([&] {
        const auto & layers = engine->table.map.layers;
        const pyorch_estimator & e = *estimator;
        if (e.n_embd < 1 || e.n_latent < 1 || e.n_hidden < 1 || e.n_layers < 1 || (size_t) e.n_layers >= layers.size()) {
            throw Failure(PYORCH_INVALID, format("an estimator for %d of %zu layers, with widths of %d, %d and %d, does not fit",
                e.n_layers, layers.size(), e.n_embd, e.n_latent, e.n_hidden));
        }
        for (int layer = 1; layer <= e.n_layers; ++layer) {
            check_experts(engine, layer, e.n_expert);
        }
        auto copy = std::make_shared<const Estimator>(e);
        engine->prefetcher.change([&](PrefetchPlanner & planner) { planner.set_estimator(std::move(copy)); });
    });
}

pyorch_status pyorch_set_hybrid(pyorch_engine * engine, const uint8_t * layers, int32_t n) {
    return guarded([&] {
        if (n < 0 || (size_t) n != engine->table.map.layers.size()) {
            throw Failure(PYORCH_INVALID, format("there are %zu layers with routed experts, not %d", engine->table.map.layers.size(), n));
        }
        engine->prefetcher.change([&](PrefetchPlanner & planner) { planner.set_estimated({ layers, layers + n }); });
    });
}

pyorch_status pyorch_estimate(pyorch_engine * engine, int32_t il, const float * state, int32_t n_embd, float * logits, int32_t n_expert) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        std::shared_ptr<const Estimator> it;
        engine->prefetcher.change([&](PrefetchPlanner & planner) { it = planner.estimator(); });
        if (!it || layer >= it->n_layers || n_embd != it->n_embd || n_expert != it->n_expert) {
            throw Failure(PYORCH_INVALID, format("there is no estimator for layer %d with states of %d values and %d experts", il, n_embd, n_expert));
        }
        std::fill(logits, logits + n_expert, 0.0f);
        it->correct(layer, state, logits);
    });
}

pyorch_status pyorch_set_calibration(pyorch_engine * engine, int32_t on) {
    return guarded([&] { engine->calibration.set(on != 0); });
}

pyorch_status pyorch_get_mean_outputs(pyorch_engine * engine, int32_t il, float * vectors, uint64_t * counts, int32_t n_expert, int32_t n_embd) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, n_expert);
        if (!engine->calibration.means(layer, vectors, counts, n_embd)) {
            throw Failure(PYORCH_INVALID, format("the outputs of layer %d do not have %d values", il, n_embd));
        }
    });
}

} // extern "C"
