#include "api/api.h"
#include "base/counters.h"
#include "pyorch-replay.h"

using namespace pyorch;

extern "C" {

pyorch_status pyorch_set_substitution(pyorch_engine * engine, int32_t il, const pyorch_substitution * substitution) {
    return guarded_outside_callbacks(__func__, [&] {
        const pyorch_substitution & s = *substitution;
        checked_choice(PYORCH_CHOICES_SUBSTITUTE_MODE, s.mode);
        checked_choice(PYORCH_CHOICES_SUBSTITUTE_ORDER, s.order);
        checked_choice(PYORCH_CHOICES_ON_MISS, s.on_miss);
        if (s.max_per_token < 0 || s.max_all_layers < 0 || s.sacred < 0 || s.among < 0 || !(s.bonus >= 0) ||
            !(s.max_weight >= 0) || !(s.temperature > 0) || !(s.read_budget >= 0) || !(s.eta >= 0) ||
            !(s.kappa >= 0 && s.kappa <= 0.5) || !(s.reuse >= 0 && s.reuse <= 1)) {
            throw Failure(PYORCH_INVALID,
                "a substitution has a temperature above 0, a kappa up to 0.5, a reuse up to 1, and nothing negative");
        }
        engine->routing.substitutions.set(engine->table.layer_index(il), s);
    });
}

pyorch_status pyorch_set_buddies(
    pyorch_engine * engine, int32_t il, int32_t n_expert, int32_t k_max, const int32_t * ids, const float * q) {
    return guarded_outside_callbacks(__func__, [&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, n_expert);
        if (k_max < 1) {
            throw Failure(PYORCH_INVALID, format("an expert cannot have lists of %d buddies", k_max));
        }
        const size_t size = (size_t) n_expert * k_max;
        for (size_t i = 0; i < size; ++i) {
            if (ids[i] < -1 || ids[i] >= n_expert || ids[i] == (int32_t) (i / k_max)) {
                throw Failure(PYORCH_INVALID,
                    format("expert %d of layer %d cannot have expert %d for a buddy", (int) (i / k_max), il, ids[i]));
            }
        }
        BuddyLists lists;
        lists.k_max = k_max;
        lists.ids.assign(ids, ids + size);
        lists.q.assign(q, q + size);
        engine->routing.substitutions.set_buddies(layer, std::move(lists));
    });
}

pyorch_status pyorch_set_ghosts(pyorch_engine * engine, int32_t il, const pyorch_ghosts * ghosts) {
    return guarded_outside_callbacks(__func__, [&] {
        const pyorch_ghosts & given = *ghosts;
        const int             layer = engine->table.layer_index(il);
        const LayerShape &    shape = engine->remote.layers[layer];
        check_experts(engine, layer, given.n_expert);
        if (given.n_in != shape.n_in || given.n_out != shape.n_out) {
            throw Failure(PYORCH_INVALID,
                format("experts of layer %d make %d values of %d, their ghosts %d of %d", il, shape.n_out, shape.n_in,
                    given.n_out, given.n_in));
        }
        engine->routing.substitutions.set_ghosts(layer, std::make_shared<const GhostLayer>(given));
    });
}

pyorch_status pyorch_set_cache(pyorch_engine * engine, int32_t il, const uint8_t * mask, int32_t n) {
    return guarded_outside_callbacks(__func__, [&] {
        const int layer = engine->table.layer_index(il);
        if (mask) {
            check_experts(engine, layer, n);
        }
        engine->routing.substitutions.set_cache(
            layer, mask ? std::vector<uint8_t>(mask, mask + n) : std::vector<uint8_t>());
    });
}

pyorch_status pyorch_simulate_cache(pyorch_engine * engine, double read_layers, uint64_t seed) {
    return guarded_outside_callbacks(__func__, [&] {
        pyorch_stats now = {};
        engine->table.add_stats(-1, now);
        pyorch_config config = engine->config;
        config.budget_bytes  = now.budget_bytes;
        engine->routing.simulated_cache =
            std::make_shared<SimulatedCache>(engine->table.map, config, read_layers, seed);
    });
}

static SimulatedCache & simulated_cache(pyorch_engine * engine) {
    if (!engine->routing.simulated_cache) {
        throw Failure(PYORCH_INVALID, "no cache is simulated");
    }
    return *engine->routing.simulated_cache;
}

pyorch_status pyorch_fill_simulated_cache(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n) {
    return guarded_outside_callbacks(__func__, [&] { simulated_cache(engine).fill(il, experts, n); });
}

pyorch_status pyorch_get_simulated_stats(pyorch_engine * engine, int32_t il, pyorch_stats * stats) {
    return guarded([&] {
        const int layer = il < 0 ? -1 : engine->table.layer_index(il);
        *stats          = {};
        simulated_cache(engine).tier().add_stats(layer, *stats);
    });
}

pyorch_status pyorch_get_substitution_counts(pyorch_engine * engine, int32_t il, pyorch_substitution_counts * counts) {
    return guarded([&] {
        pyorch_substitution_counts sum  = {};
        const int                  only = il < 0 ? -1 : engine->table.layer_index(il);
        for (int layer = 0; layer < (int) engine->table.map.layers.size(); ++layer) {
            if (only < 0 || layer == only) {
                add_counts(sum, engine->routing.substitutions.counts(layer));
            }
        }
        *counts = sum;
    });
}

} // extern "C"
