// The C API: arguments in, exceptions out.

#include "engine.h"
#include "routing.h"

#include <algorithm>
#include <cstring>

struct pyorch_map {
    pyorch::ModelMap map;
};

namespace {

using pyorch::Failure;
using pyorch::format;

thread_local std::string last_error;

template <typename Body>
pyorch_status guarded(Body body) {
    try {
        body();
        return PYORCH_OK;
    } catch (const Failure & e) {
        last_error = e.what();
        return e.status;
    } catch (const std::bad_alloc &) {
        last_error = "out of memory";
        return PYORCH_IO;
    } catch (const std::exception & e) {
        last_error = e.what();
        return PYORCH_IO;
    }
}

template <size_t N>
void copy_text(char (&to)[N], const std::string & from) {
    const size_t n = std::min(from.size(), N - 1);
    memcpy(to, from.data(), n);
    to[n] = '\0';
}

const pyorch::MoeLayer & layer_at(const pyorch_map * map, int32_t il) {
    const pyorch::MoeLayer * layer = map->map.find(il);
    if (!layer) {
        throw Failure(PYORCH_INVALID, format("layer %d has no routed experts", il));
    }
    return *layer;
}

void check_experts(pyorch_engine * engine, int layer, int n_expert) {
    const auto & l = engine->table.map.layers[layer];
    if (n_expert != l.n_expert) {
        throw Failure(PYORCH_INVALID, format("layer %d has %d experts, not %d", l.il, l.n_expert, n_expert));
    }
}

void check_policy(int32_t policy) {
    if (policy != PYORCH_LRU && policy != PYORCH_LFU) {
        throw Failure(PYORCH_INVALID, format("unknown eviction policy %d", policy));
    }
}

} // namespace

extern "C" {

const char * pyorch_last_error(void) {
    return last_error.c_str();
}

//
// model map
//

pyorch_status pyorch_map_open(const char * path, pyorch_map ** map) {
    return guarded([&] { *map = new pyorch_map { pyorch::ModelMap(path) }; });
}

void pyorch_map_free(pyorch_map * map) {
    delete map;
}

pyorch_status pyorch_map_get_info(const pyorch_map * map, pyorch_map_info * info) {
    return guarded([&] {
        const auto & m = map->map;
        *info = {};
        copy_text(info->arch, m.arch);
        copy_text(info->name, m.name);
        info->n_files       = (int32_t) m.files.size();
        info->n_layers      = m.n_layers;
        info->n_moe_layers  = (int32_t) m.layers.size();
        info->n_expert_used = m.n_expert_used;
        info->file_bytes    = m.file_bytes();
        info->expert_bytes  = m.expert_bytes();
        info->dense_bytes   = m.tensor_bytes - info->expert_bytes;
        info->slots_bytes   = m.slots_bytes();
        info->floor_bytes   = m.floor_bytes();
    });
}

pyorch_status pyorch_map_get_layer(const pyorch_map * map, int32_t index, pyorch_layer_info * info) {
    return guarded([&] {
        if (index < 0 || (size_t) index >= map->map.layers.size()) {
            throw Failure(PYORCH_INVALID, format("there are %zu layers with routed experts, not %d", map->map.layers.size(), index + 1));
        }
        const auto & layer = map->map.layers[index];
        *info = {};
        info->il           = layer.il;
        info->n_expert     = layer.n_expert;
        info->n_roles      = (int32_t) layer.tensors.size();
        info->expert_bytes = layer.expert_bytes();
        info->slot_bytes   = layer.slot_bytes();
        for (size_t r = 0; r < layer.tensors.size(); ++r) {
            copy_text(info->role[r], layer.tensors[r].role);
            copy_text(info->type[r], layer.tensors[r].type);
        }
    });
}

pyorch_status pyorch_map_get_range(const pyorch_map * map, int32_t il, int32_t expert, int32_t role,
                                   const char ** path, uint64_t * offset, uint64_t * size) {
    return guarded([&] {
        const auto & layer = layer_at(map, il);
        if (expert < 0 || expert >= layer.n_expert || role < 0 || (size_t) role >= layer.tensors.size()) {
            throw Failure(PYORCH_INVALID, format("layer %d has no matrix %d of expert %d", il, role, expert));
        }
        const auto & t = layer.tensors[role];
        *path   = map->map.files[t.file].path.c_str();
        *offset = t.offset + expert * t.stride;
        *size   = t.stride;
    });
}

pyorch_status pyorch_map_get_int(const pyorch_map * map, const char * key, int32_t index, int64_t * value) {
    return guarded([&] {
        if (!map->map.get_int(key, index, *value)) {
            throw Failure(PYORCH_INVALID, format("no integer %s in the metadata", key));
        }
    });
}

pyorch_status pyorch_map_get_tensor(const pyorch_map * map, const char * name,
                                    const char ** path, uint64_t * offset, uint64_t * size) {
    return guarded([&] {
        const auto t = map->map.tensors.find(name);
        if (t == map->map.tensors.end()) {
            throw Failure(PYORCH_INVALID, format("%s has no tensor %s", map->map.files[0].path.c_str(), name));
        }
        *path   = map->map.files[t->second.file].path.c_str();
        *offset = t->second.offset;
        *size   = t->second.bytes;
    });
}

pyorch_status pyorch_map_get_str(const pyorch_map * map, const char * key, const char ** value) {
    return guarded([&] {
        if (!map->map.get_str(key, *value)) {
            throw Failure(PYORCH_INVALID, format("no string %s in the metadata", key));
        }
    });
}

//
// engine
//

pyorch_status pyorch_engine_new(const pyorch_map * map, const pyorch_config * config, pyorch_engine ** engine) {
    return guarded([&] {
        check_policy(config->policy);
        if (map->map.layers.empty()) {
            throw Failure(PYORCH_INVALID, format("%s has no routed experts", map->map.files[0].path.c_str()));
        }
        *engine = new pyorch_engine(map->map, *config);
    });
}

void pyorch_engine_free(pyorch_engine * engine) {
    delete engine;
}

pyorch_status pyorch_engine_capture(pyorch_engine * engine) {
    return guarded([&] { pyorch::capture(engine ? &engine->table.map : nullptr, engine); });
}

pyorch_status pyorch_capture_mapped(const pyorch_map * map) {
    return guarded([&] { pyorch::capture(map ? &map->map : nullptr, nullptr); });
}

pyorch_status pyorch_engine_error(pyorch_engine * engine, char * buf, size_t size) {
    return guarded([&] {
        const std::string text = engine->table.last_error();
        if (size > 0) {
            const size_t n = std::min(text.size(), size - 1);
            memcpy(buf, text.data(), n);
            buf[n] = '\0';
        }
    });
}

pyorch_status pyorch_set_budget(pyorch_engine * engine, uint64_t budget_bytes) {
    return guarded([&] { engine->table.set_budget(budget_bytes); });
}

pyorch_status pyorch_set_policy(pyorch_engine * engine, int32_t policy) {
    return guarded([&] {
        check_policy(policy);
        engine->table.set_policy((pyorch_policy) policy);
    });
}

pyorch_status pyorch_set_layer_limits(pyorch_engine * engine, int32_t il, int32_t min, int32_t max) {
    return guarded([&] { engine->table.set_layer_limits(il, min, max); });
}

pyorch_status pyorch_get_residency(pyorch_engine * engine, int32_t il, uint8_t * mask, int32_t n) {
    return guarded([&] { engine->table.get_residency(il, mask, n); });
}

pyorch_status pyorch_prefetch(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n) {
    return guarded([&] { engine->table.prefetch(il, experts, n); });
}

pyorch_status pyorch_set_prefetch(pyorch_engine * engine, int32_t predictor, int32_t distance, double min_precision, int32_t automatic) {
    return guarded([&] {
        if (predictor < PYORCH_PREDICT_NONE || predictor > PYORCH_PREDICT_QUASI_HIDDEN) {
            throw Failure(PYORCH_INVALID, format("unknown predictor %d", predictor));
        }
        const int n_layers = (int) engine->table.map.layers.size();
        if (distance < 1 || distance > n_layers || !(min_precision >= 0 && min_precision <= 1)) {
            throw Failure(PYORCH_INVALID, format("a prefetch needs a distance from 1 to %d and a precision from 0 to 1, not %d and %g",
                n_layers, distance, min_precision));
        }
        engine->prefetcher.set((pyorch_predictor) predictor, distance, min_precision, automatic != 0);
    });
}

pyorch_status pyorch_set_default_vectors(pyorch_engine * engine, int32_t il, const float * vectors, int32_t n_expert, int32_t n_embd) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, n_expert);
        engine->prefetcher.set_default_vectors(layer, std::vector<float>(vectors, vectors + (size_t) n_expert * n_embd));
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

pyorch_status pyorch_set_prediction_observer(pyorch_engine * engine, pyorch_prediction_fn observer, void * user) {
    return guarded([&] {
        if (!observer) {
            engine->prefetcher.set_observer({});
            return;
        }
        engine->prefetcher.set_observer([=](const void * context, int from, int layer, const std::vector<int32_t> & experts) {
            const auto & layers = engine->table.map.layers;
            observer(user, context, layers[from].il, layers[layer].il, experts.data(), (int32_t) experts.size());
        });
    });
}

pyorch_status pyorch_pin(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n) {
    return guarded([&] { engine->table.pin(il, experts, n); });
}

pyorch_status pyorch_unpin(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n) {
    return guarded([&] { engine->table.unpin(il, experts, n); });
}

pyorch_status pyorch_evict(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n) {
    return guarded([&] { engine->table.evict(il, experts, n); });
}

pyorch_status pyorch_wait_idle(pyorch_engine * engine) {
    return guarded([&] { engine->table.wait_idle(); });
}

pyorch_status pyorch_get_stats(pyorch_engine * engine, int32_t il, pyorch_stats * stats) {
    return guarded([&] { engine->table.get_stats(il, *stats); });
}

pyorch_status pyorch_reset_stats(pyorch_engine * engine) {
    return guarded([&] {
        engine->table.reset_stats();
        engine->substitutions.reset_counts();
    });
}

pyorch_status pyorch_set_observer(pyorch_engine * engine, pyorch_observer_fn observer, void * user) {
    return guarded([&] {
        std::lock_guard<std::mutex> lock(engine->observer_mutex);
        engine->observer      = observer;
        engine->observer_user = user;
    });
}

//
// substitution
//

pyorch_status pyorch_set_substitution(pyorch_engine * engine, int32_t il, const pyorch_substitution * substitution) {
    return guarded([&] {
        const pyorch_substitution & s = *substitution;
        if (s.mode < PYORCH_SUBSTITUTE_NONE || s.mode > PYORCH_SUBSTITUTE_RANDOM ||
            s.weight < PYORCH_WEIGHT_KEEP || s.weight > PYORCH_WEIGHT_FITTED ||
            s.order < PYORCH_ORDER_RANK || s.order > PYORCH_ORDER_WEIGHT ||
            s.on_miss < PYORCH_MISS_FETCH || s.on_miss > PYORCH_MISS_DROP) {
            throw Failure(PYORCH_INVALID, "a substitution's mode, weight, order or on_miss is not known");
        }
        if (s.search_rank < 0 || s.max_per_token < 0 || !(s.temperature > 0) || !(s.reuse >= 0) || !(s.read_ms >= 0)) {
            throw Failure(PYORCH_INVALID, "a substitution needs a temperature above 0, and no negative rank, limit, reuse or read_ms");
        }
        engine->substitutions.set(engine->table.layer_index(il), s);
    });
}

pyorch_status pyorch_set_buddies(pyorch_engine * engine, int32_t il, int32_t n_expert, int32_t k_max, const int32_t * ids,
                                 const float * q, const float * scale, const uint8_t * hops) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        const int n     = engine->table.map.layers[layer].n_expert;
        if (n_expert != n || k_max < 1) {
            throw Failure(PYORCH_INVALID, format("layer %d has %d experts, the buddy lists are for %d", il, n, n_expert));
        }
        const size_t size = (size_t) n * k_max;
        for (size_t i = 0; i < size; ++i) {
            if (ids[i] < -1 || ids[i] >= n || ids[i] == (int32_t) (i / k_max)) {
                throw Failure(PYORCH_INVALID, format("expert %d of layer %d cannot have expert %d for a buddy", (int) (i / k_max), il, ids[i]));
            }
        }
        pyorch::BuddyLists lists;
        lists.k_max = k_max;
        lists.ids.assign(ids, ids + size);
        lists.q.assign(q, q + size);
        if (scale) {
            lists.scale.assign(scale, scale + size);
        }
        if (hops) {
            lists.hops.assign(hops, hops + n);
        }
        engine->substitutions.set_buddies(layer, std::move(lists));
    });
}

pyorch_status pyorch_set_cache(pyorch_engine * engine, int32_t il, const uint8_t * mask, int32_t n) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        if (mask && n != engine->table.map.layers[layer].n_expert) {
            throw Failure(PYORCH_INVALID, format("layer %d has %d experts, the mask %d", il, engine->table.map.layers[layer].n_expert, n));
        }
        engine->substitutions.set_cache(layer, mask ? std::vector<uint8_t>(mask, mask + n) : std::vector<uint8_t>());
    });
}

pyorch_status pyorch_get_substitution_counts(pyorch_engine * engine, int32_t il, pyorch_substitution_counts * counts) {
    return guarded([&] {
        *counts = {};
        const int only = il < 0 ? -1 : engine->table.layer_index(il);
        for (int layer = 0; layer < (int) engine->table.map.layers.size(); ++layer) {
            if (only < 0 || layer == only) {
                pyorch::add(*counts, engine->substitutions.counts(layer));
            }
        }
    });
}

pyorch_status pyorch_substitute(pyorch_engine * engine, const pyorch_routing * routing, const uint8_t * resident,
                                int32_t normalized, int32_t softmax_selected, int32_t * experts, float * weights,
                                pyorch_substitution_counts * counts) {
    return guarded([&] {
        const int layer = engine->table.layer_index(routing->il);
        const int n     = engine->table.map.layers[layer].n_expert;
        const size_t n_slots = (size_t) routing->n_tokens * routing->n_expert_used;
        if (routing->n_expert != n || routing->n_tokens < 1 || routing->n_expert_used < 1) {
            throw Failure(PYORCH_INVALID, format("layer %d has %d experts, the routing %d", routing->il, n, routing->n_expert));
        }
        for (size_t i = 0; i < n_slots; ++i) {
            if (routing->experts[i] < 0 || routing->experts[i] >= n) {
                throw Failure(PYORCH_INVALID, format("layer %d has experts 0 to %d, not %d", routing->il, n - 1, routing->experts[i]));
            }
        }
        std::copy(routing->experts, routing->experts + n_slots, experts);
        std::copy(routing->weights, routing->weights + n_slots, weights);
        const pyorch::RoutedBatch batch = {
            routing->n_tokens, n, routing->n_expert_used, experts, weights, routing->probs, routing->logits, resident,
            normalized != 0, softmax_selected != 0,
        };
        *counts = engine->substitutions.preview(layer, routing->il, batch);
    });
}

} // extern "C"
