#include "api/api.h"
#include "api/choices.h"
#include "api/handles.h"
#include "api/structs.h"
#include "base/counters.h"
#include "pyorch-replay.h"

#include <algorithm>
#include <numeric>

using namespace pyorch;

extern "C" {

pyorch_status pyorch_substitution_default(pyorch_substitution * substitution, uint64_t struct_size) {
    return guarded([&] { write_default(substitution, struct_size, "pyorch_substitution", default_substitution()); });
}

pyorch_status pyorch_set_substitution(pyorch_engine * engine, int32_t il, const pyorch_substitution * substitution) {
    return guarded_outside_callbacks(__func__, [&] {
        const pyorch_substitution s = read_struct(substitution, "pyorch_substitution", default_substitution());
        checked_choice(PYORCH_CHOICES_SUBSTITUTE_MODE, s.mode);
        checked_choice(PYORCH_CHOICES_SUBSTITUTE_WEIGHT, s.weight);
        checked_choice(PYORCH_CHOICES_SUBSTITUTE_ORDER, s.order);
        checked_choice(PYORCH_CHOICES_ON_MISS, s.on_miss);
        if (s.search_rank < 0 || s.max_per_token < 0 || s.max_all_layers < 0 || s.sacred < 0 || s.among < 0 ||
            !(s.temperature > 0) || !(s.reuse >= 0) || !(s.read_ms >= 0) || !(s.bonus >= 0) || !(s.max_error >= 0)) {
            throw Failure(PYORCH_INVALID,
                "a substitution needs a temperature above 0, and no negative rank, limit, reuse, bonus, error or "
                "read_ms");
        }
        engine->routing.substitutions.set(engine->table.layer_index(il), s);
    });
}

pyorch_status pyorch_set_buddies(pyorch_engine * engine, int32_t il, int32_t n_expert, int32_t k_max,
    const int32_t * ids, const float * q, const float * scale, const uint8_t * hops) {
    return guarded_outside_callbacks(__func__, [&] {
        const int layer = engine->table.layer_index(il);
        const int n     = engine->table.map.layers[layer].n_expert;
        if (n_expert != n || k_max < 1) {
            throw Failure(
                PYORCH_INVALID, format("layer %d has %d experts, the buddy lists are for %d", il, n, n_expert));
        }
        const size_t size = (size_t) n * k_max;
        for (size_t i = 0; i < size; ++i) {
            if (ids[i] < -1 || ids[i] >= n || ids[i] == (int32_t) (i / k_max)) {
                throw Failure(PYORCH_INVALID,
                    format("expert %d of layer %d cannot have expert %d for a buddy", (int) (i / k_max), il, ids[i]));
            }
        }
        BuddyLists lists;
        lists.k_max = k_max;
        lists.ids.assign(ids, ids + size);
        lists.q.assign(q, q + size);
        if (scale) {
            lists.scale.assign(scale, scale + size);
        }
        if (hops) {
            lists.hops.assign(hops, hops + n);
        }
        engine->routing.substitutions.set_buddies(layer, std::move(lists));
    });
}

pyorch_status pyorch_set_buddy_errors(
    pyorch_engine * engine, int32_t il, int32_t n_expert, int32_t k_max, const float * error) {
    return guarded_outside_callbacks(__func__, [&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, n_expert);
        const size_t       n = (size_t) n_expert * std::max(k_max, 0);
        std::vector<float> errors(error, error + n);
        if (std::any_of(errors.begin(), errors.end(), [](float x) { return x < 0 || x > 1; })) {
            throw Failure(PYORCH_INVALID, "what a buddy leaves of an output is from 0 to 1");
        }
        if (!engine->routing.substitutions.set_buddy_errors(layer, k_max, std::move(errors))) {
            throw Failure(PYORCH_INVALID, format("layer %d has no lists of %d buddies", il, k_max));
        }
    });
}

pyorch_status pyorch_ghosts_default(pyorch_ghosts * ghosts, uint64_t struct_size) {
    return guarded([&] { write_default(ghosts, struct_size, "pyorch_ghosts", pyorch_ghosts{}); });
}

pyorch_status pyorch_set_ghosts(pyorch_engine * engine, int32_t il, const pyorch_ghosts * ghosts) {
    return guarded_outside_callbacks(__func__, [&] {
        const pyorch_ghosts given = read_struct(ghosts, "pyorch_ghosts", pyorch_ghosts{});
        const int           layer = engine->table.layer_index(il);
        const LayerShape &  shape = engine->remote.layers[layer];
        check_experts(engine, layer, given.n_expert);
        if (given.n_in != shape.n_in || given.n_out != shape.n_out) {
            throw Failure(PYORCH_INVALID,
                format("experts of layer %d make %d values of %d, their ghosts %d of %d", il, shape.n_out, shape.n_in,
                    given.n_out, given.n_in));
        }
        engine->routing.substitutions.set_ghosts(layer, std::make_shared<const GhostLayer>(given));
    });
}

pyorch_status pyorch_apply_ghosts(
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

pyorch_status pyorch_set_cache(pyorch_engine * engine, int32_t il, const uint8_t * mask, int32_t n) {
    return guarded_outside_callbacks(__func__, [&] {
        const int layer = engine->table.layer_index(il);
        if (mask && n != engine->table.map.layers[layer].n_expert) {
            throw Failure(PYORCH_INVALID,
                format("layer %d has %d experts, the mask %d", il, engine->table.map.layers[layer].n_expert, n));
        }
        engine->routing.substitutions.set_cache(
            layer, mask ? std::vector<uint8_t>(mask, mask + n) : std::vector<uint8_t>());
    });
}

pyorch_status pyorch_simulate_cache(pyorch_engine * engine, int32_t on, double read_layers, uint64_t seed) {
    return guarded_outside_callbacks(__func__, [&] {
        std::shared_ptr<SimulatedCache> cache;
        if (on) {
            pyorch_stats now = {};
            engine->table.get_stats(-1, now);
            pyorch_config config = engine->config;
            config.budget_bytes  = now.budget_bytes;
            cache                = std::make_shared<SimulatedCache>(engine->table.map, config, read_layers, seed);
        }
        engine->routing.simulated_cache = std::move(cache);
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
        pyorch_stats out = {};
        simulated_cache(engine).get_stats(il, out);
        write_struct(stats, "pyorch_stats", out);
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
        write_struct(counts, "pyorch_substitution_counts", sum);
    });
}

pyorch_status pyorch_substitute(pyorch_engine * engine, const pyorch_routing * routing, const uint8_t * resident,
    int32_t normalized, int32_t softmax_selected, int32_t * experts, float * weights,
    pyorch_substitution_counts * counts) {
    return guarded([&] {
        const pyorch_routing given = read_struct(routing, "pyorch_routing", pyorch_routing{});
        check_struct(counts, "pyorch_substitution_counts");
        const int    layer   = engine->table.layer_index(given.il);
        const int    n       = engine->table.map.layers[layer].n_expert;
        const size_t n_slots = (size_t) given.n_tokens * given.n_expert_used;
        if (given.n_expert != n || given.n_tokens < 1 || given.n_expert_used < 1) {
            throw Failure(
                PYORCH_INVALID, format("layer %d has %d experts, the routing %d", given.il, n, given.n_expert));
        }
        for (size_t i = 0; i < n_slots; ++i) {
            if (given.experts[i] < 0 || given.experts[i] >= n) {
                throw Failure(
                    PYORCH_INVALID, format("layer %d has experts 0 to %d, not %d", given.il, n - 1, given.experts[i]));
            }
        }
        std::copy(given.experts, given.experts + n_slots, experts);
        std::copy(given.weights, given.weights + n_slots, weights);
        RoutedBatch batch       = {};
        batch.layer             = layer;
        batch.il                = given.il;
        batch.n_tokens          = given.n_tokens;
        batch.n_expert          = n;
        batch.n_used            = given.n_expert_used;
        batch.requested         = given.experts;
        batch.requested_weights = given.weights;
        batch.probs             = given.probs;
        batch.logits            = given.logits;
        batch.normalized        = normalized != 0;
        batch.softmax_selected  = softmax_selected != 0;
        batch.experts           = experts;
        batch.weights           = weights;
        write_struct(counts, "pyorch_substitution_counts", engine->routing.substitutions.preview(batch, resident));
    });
}

} // extern "C"
