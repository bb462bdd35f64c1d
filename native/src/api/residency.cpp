#include "api/api.h"
#include "pyorch-devices.h"

using namespace pyorch;

static void add_device_flags(pyorch_engine & engine, int layer, uint8_t * flags) {
    std::vector<uint8_t> on_device(engine.table.map.layers[layer].n_expert);
    engine.device->mark(layer, on_device);
    for (size_t expert = 0; expert < on_device.size(); ++expert) {
        flags[expert] |= on_device[expert] ? PYORCH_ON_DEVICE : 0;
    }
}

extern "C" {

pyorch_status pyorch_set_layer_limits(pyorch_engine * engine, int32_t il, int32_t min, int32_t max) {
    return guarded_outside_callbacks(
        __func__, [&] { engine->table.set_limits(engine->table.layer_index(il), min, max); });
}

pyorch_status pyorch_set_device_limits(pyorch_engine * engine, int32_t il, int32_t min, int32_t max) {
    return guarded_outside_callbacks(__func__, [&] {
        const int layer = engine->table.layer_index(il);
        if (!engine->device) {
            throw pyorch::Failure(PYORCH_INVALID, "the engine was made without a device");
        }
        engine->device->set_limits(layer, min, max);
    });
}

pyorch_status pyorch_get_residency(pyorch_engine * engine, int32_t il, uint8_t * mask, int32_t n) {
    return guarded([&] {
        engine->table.get_residency(il, mask, n);
        if (engine->device) {
            add_device_flags(*engine, engine->table.layer_index(il), mask);
        }
    });
}

pyorch_status pyorch_prefetch(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n) {
    return guarded([&] { engine->table.prefetch(il, experts, n); });
}

pyorch_status pyorch_pin(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n) {
    return guarded([&] { engine->table.pin(il, experts, n); });
}

pyorch_status pyorch_offer(pyorch_engine * engine, int32_t il, int32_t expert, const void * bytes, uint64_t size) {
    return guarded_outside_callbacks(__func__, [&] { engine->table.offer(il, expert, bytes, size); });
}

pyorch_status pyorch_unpin(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n) {
    return guarded([&] { engine->table.unpin(il, experts, n); });
}

pyorch_status pyorch_evict(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n) {
    return guarded([&] { engine->table.evict(il, experts, n); });
}

pyorch_status pyorch_wait_idle(pyorch_engine * engine) {
    return guarded_outside_callbacks(__func__, [&] {
        engine->prefetcher.wait_idle();
        engine->table.wait_idle();
        if (engine->device) {
            engine->device->wait_idle();
        }
    });
}

pyorch_status pyorch_get_stats(pyorch_engine * engine, int32_t il, pyorch_stats * stats) {
    return guarded([&] {
        const int layer = il < 0 ? -1 : engine->table.layer_index(il);
        *stats          = {};
        for (Tier * tier : engine->tiers) {
            tier->add_stats(layer, *stats);
        }
    });
}

pyorch_status pyorch_get_snapshot(pyorch_engine * engine, pyorch_snapshot * snapshot) {
    return guarded([&] {
        pyorch_snapshot & out = *snapshot;
        engine->table.get_snapshot(out);
        for (auto tier = engine->tiers.begin() + 1; tier != engine->tiers.end(); ++tier) {
            (*tier)->add_stats(-1, out.stats);
            for (int layer = 0; out.flags && layer < out.n_layers; ++layer) {
                (*tier)->add_stats(layer, out.layers[layer]);
            }
        }
        for (int layer = 0; engine->device && out.flags && layer < out.n_layers; ++layer) {
            add_device_flags(*engine, layer, out.flags + (size_t) layer * out.n_expert);
        }
    });
}

pyorch_status pyorch_get_activations(pyorch_engine * engine, int32_t il, uint64_t * counts, int32_t n) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, n);
        engine->routing.activations.copy(layer, counts);
    });
}

pyorch_status pyorch_reset_stats(pyorch_engine * engine) {
    return guarded_outside_callbacks(__func__, [&] {
        for (Tier * tier : engine->tiers) {
            tier->reset_stats();
        }
        if (engine->routing.simulated_cache) {
            engine->routing.simulated_cache->tier().reset_stats();
        }
        engine->routing.substitutions.reset_counts();
        engine->routing.speculation.reset_counts();
    });
}

} // extern "C"
