#include "api/api.h"
#include "prediction/estimator.h"
#include "pyorch-replay.h"

#include <algorithm>

namespace pyorch {
namespace {

LayerPrefetch layer_prefetch(pyorch_engine * engine, int32_t predictor, int32_t distance, double min_precision) {
    checked_choice(PYORCH_CHOICES_PREDICTOR, predictor, engine->simulated);
    const int n_layers = (int) engine->table.map.layers.size();
    if (distance < 1 || distance > n_layers || !(min_precision <= 1)) {
        throw Failure(PYORCH_INVALID,
            format("a prefetch needs a distance from 1 to %d and a precision of 1 at most, not %d and %g", n_layers,
                distance, min_precision));
    }
    return { (pyorch_predictor) predictor, distance, min_precision };
}

void check_width(int32_t n_embd) {
    if (n_embd < 1) {
        throw Failure(PYORCH_INVALID, format("an output of an expert cannot have %d values", n_embd));
    }
}

// Checks that a predictor can apply the routers, as far as graphs were built.
void check_routers(const pyorch_engine * engine, pyorch_predictor kind) {
    const std::string why = needs_of(kind) & PYORCH_NEEDS_ROUTERS ? engine->routers.unknown() : "";
    if (!why.empty()) {
        throw Failure(PYORCH_INVALID, why + ": no predictor can apply its router");
    }
}

Router router_at(const pyorch_engine * engine, int32_t il) {
    const Router router = engine->routers.all()[engine->table.layer_index(il)];
    if (!router) {
        const std::string why = engine->routers.unknown();
        throw Failure(PYORCH_INVALID, why.empty() ? format("the router of layer %d is not known", il) : why);
    }
    return router;
}

} // namespace
} // namespace pyorch

using namespace pyorch;

extern "C" {

pyorch_status pyorch_set_prefetch(
    pyorch_engine * engine, int32_t il, int32_t predictor, int32_t distance, double min_precision, int32_t automatic) {
    return guarded_outside_callbacks(__func__, [&] {
        const auto prefetch = layer_prefetch(engine, predictor, distance, min_precision);
        const int  only     = il < 0 ? -1 : engine->table.layer_index(il);
        if (!automatic) {
            check_routers(engine, prefetch.kind);
        }
        if (only < 0) {
            engine->prefetcher.set_automatic(automatic != 0);
            if (engine->device) {
                engine->device->set_by_forecasts(!automatic);
            }
        }
        engine->prefetcher.change([&](PrefetchPlanner & planner) {
            for (int layer = 0; layer < (int) engine->table.map.layers.size(); ++layer) {
                if (only < 0 || layer == only) {
                    planner.set(layer, prefetch);
                }
            }
        });
    });
}

pyorch_status pyorch_check_routers(pyorch_engine * engine) {
    return guarded_outside_callbacks(__func__, [&] { engine->routing.check_routers(); });
}

pyorch_status pyorch_set_router(pyorch_engine * engine, int32_t il, const pyorch_router * router) {
    return guarded_outside_callbacks(__func__, [&] {
        const int    layer = engine->table.layer_index(il);
        const Router r(*router);
        check_experts(engine, layer, r.n_expert);
        if (!engine->simulated) {
            throw Failure(PYORCH_INVALID, "routers are set for simulated engines: others have those of the model");
        }
        checked_choice(PYORCH_CHOICES_GATING, r.gating);
        if (r.n_used < 1 || r.n_used > r.n_expert || r.n_groups < 1 || r.n_expert % r.n_groups || r.n_groups_used < 1 ||
            r.n_groups_used > r.n_groups || r.n_used > r.n_expert / r.n_groups * r.n_groups_used) {
            throw Failure(PYORCH_INVALID,
                format("a router cannot select %d of %d experts from %d of %d groups", r.n_used, r.n_expert,
                    r.n_groups_used, r.n_groups));
        }
        engine->routers.set_copy(layer, r);
    });
}

pyorch_status pyorch_get_router(pyorch_engine * engine, int32_t il, pyorch_router * router) {
    return guarded([&] { *router = router_at(engine, il); });
}

pyorch_status pyorch_set_default_vectors(
    pyorch_engine * engine, int32_t il, const float * vectors, int32_t n_expert, int32_t n_embd) {
    return guarded_outside_callbacks(__func__, [&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, n_expert);
        check_width(n_embd);
        auto copy = std::make_shared<const CompactMatrix>(vectors, n_expert, n_embd);
        engine->prefetcher.change(
            [&](PrefetchPlanner & planner) { planner.change_model().defaults[layer] = std::move(copy); });
    });
}

pyorch_status pyorch_set_estimator(pyorch_engine * engine, const pyorch_estimator * estimator) {
    return guarded_outside_callbacks(__func__, [&] {
        const auto &             layers = engine->table.map.layers;
        const pyorch_estimator & e      = *estimator;
        if (e.n_embd < 1 || e.n_latent < 1 || e.n_hidden < 1 || e.n_layers < 1 ||
            (size_t) e.n_layers >= layers.size()) {
            throw Failure(PYORCH_INVALID,
                format("an estimator for %d of %zu layers, with widths of %d, %d and %d, does not fit", e.n_layers,
                    layers.size(), e.n_embd, e.n_latent, e.n_hidden));
        }
        for (int layer = 1; layer <= e.n_layers; ++layer) {
            check_experts(engine, layer, e.n_expert);
        }
        auto copy = std::make_shared<const Estimator>(e);
        engine->prefetcher.change(
            [&](PrefetchPlanner & planner) { planner.change_model().estimator = std::move(copy); });
    });
}

pyorch_status pyorch_set_hybrid(pyorch_engine * engine, const uint8_t * layers, int32_t n) {
    return guarded_outside_callbacks(__func__, [&] {
        if (n < 0 || (size_t) n != engine->table.map.layers.size()) {
            throw Failure(PYORCH_INVALID,
                format("there are %zu layers with routed experts, not %d", engine->table.map.layers.size(), n));
        }
        engine->prefetcher.change(
            [&](PrefetchPlanner & planner) { planner.change_model().estimated.assign(layers, layers + n); });
    });
}

pyorch_status pyorch_set_calibration(pyorch_engine * engine, int32_t on) {
    return guarded_outside_callbacks(__func__, [&] { engine->routing.calibration.set(on != 0); });
}

pyorch_status pyorch_get_mean_outputs(
    pyorch_engine * engine, int32_t il, float * vectors, uint64_t * counts, int32_t n_expert, int32_t n_embd) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, n_expert);
        check_width(n_embd);
        if (!engine->routing.calibration.means(layer, vectors, counts, n_embd)) {
            throw Failure(PYORCH_INVALID, format("the outputs of layer %d do not have %d values", il, n_embd));
        }
    });
}

pyorch_status pyorch_set_speculation(pyorch_engine * engine, int32_t mode) {
    return guarded_outside_callbacks(__func__, [&] {
        checked_choice(PYORCH_CHOICES_SPECULATE, mode);
        const pyorch_speculate before = engine->routing.speculation.mode();
        engine->routing.speculation.set((pyorch_speculate) mode);
        try {
            engine->routing.check_routers();
        } catch (const Failure &) {
            engine->routing.speculation.set(before);
            throw;
        }
        engine->prefetcher.change(
            [&](PrefetchPlanner & planner) { planner.set_speculative(mode != PYORCH_SPECULATE_NONE); });
    });
}

pyorch_status pyorch_get_speculation_counts(pyorch_engine * engine, pyorch_speculation_counts * counts) {
    return guarded([&] { *counts = engine->routing.speculation.counts(); });
}

} // extern "C"
