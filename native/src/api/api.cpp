// The C API: arguments in, exceptions out.

#include "engine.h"
#include "prediction/estimator.h"
#include "prediction/expert_maps.h"
#include "replay/replay.h"
#include "routing/seam.h"

#include <algorithm>
#include <cstring>

struct pyorch_map {
    pyorch::ModelMap map;
};

struct pyorch_maps {
    std::shared_ptr<pyorch::ExpertMaps> history;
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

const pyorch::TensorRange & tensor_at(const pyorch_map * map, const char * name) {
    const auto t = map->map.tensors.find(name);
    if (t == map->map.tensors.end()) {
        throw Failure(PYORCH_INVALID, format("%s has no tensor %s", map->map.files[0].path.c_str(), name));
    }
    return t->second;
}

void check_experts(pyorch_engine * engine, int layer, int n_expert) {
    const auto & l = engine->table.map.layers[layer];
    if (n_expert != l.n_expert) {
        throw Failure(PYORCH_INVALID, format("layer %d has %d experts, not %d", l.il, l.n_expert, n_expert));
    }
}

void check_policy(int32_t policy, bool simulated) {
    if (policy < PYORCH_LRU || policy > (simulated ? PYORCH_BELADY : PYORCH_FINEMOE)) {
        throw Failure(PYORCH_INVALID, policy == PYORCH_BELADY ? "Belady's policy needs to know the future: only a replay does" :
            format("unknown eviction policy %d", policy));
    }
}

pyorch::LayerPrefetch layer_prefetch(pyorch_engine * engine, int32_t predictor, int32_t distance, double min_precision) {
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
        const pyorch::TensorRange & t = tensor_at(map, name);
        *path   = map->map.files[t.file].path.c_str();
        *offset = t.offset;
        *size   = t.bytes;
    });
}

pyorch_status pyorch_map_get_tensor_type(const pyorch_map * map, const char * name, const char ** type) {
    return guarded([&] { *type = tensor_at(map, name).type.c_str(); });
}

pyorch_status pyorch_map_get_float(const pyorch_map * map, const char * key, double * value) {
    return guarded([&] {
        if (!map->map.get_float(key, *value)) {
            throw Failure(PYORCH_INVALID, format("no floating-point number %s in the metadata", key));
        }
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
        check_policy(config->policy, config->simulated != 0);
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
    return guarded([&] {
        if (engine && engine->simulated) {
            throw Failure(PYORCH_INVALID, "a simulated engine reads nothing: no model can be loaded under it");
        }
        pyorch::capture(engine ? &engine->table.map : nullptr, engine);
    });
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
        check_policy(policy, engine->simulated);
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
        const auto prefetch = layer_prefetch(engine, predictor, distance, min_precision);
        engine->prefetcher.set_automatic(automatic != 0);
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) {
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
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) { planner.set(layer, prefetch); });
    });
}

pyorch_status pyorch_set_speculation(pyorch_engine * engine, int32_t mode) {
    return guarded([&] {
        if (mode < PYORCH_SPECULATE_NONE || mode > PYORCH_SPECULATE_ALL) {
            throw Failure(PYORCH_INVALID, format("unknown mode of speculation %d", mode));
        }
        engine->speculation.set((pyorch_speculate) mode);
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) { planner.set_speculative(mode != PYORCH_SPECULATE_NONE); });
    });
}

pyorch_status pyorch_get_speculation_counts(pyorch_engine * engine, pyorch_speculation_counts * counts) {
    return guarded([&] { *counts = engine->speculation.counts(); });
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
        auto copy = std::make_shared<const pyorch::Estimator>(e);
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) { planner.set_estimator(std::move(copy)); });
    });
}

pyorch_status pyorch_set_hybrid(pyorch_engine * engine, const uint8_t * layers, int32_t n) {
    return guarded([&] {
        if (n < 0 || (size_t) n != engine->table.map.layers.size()) {
            throw Failure(PYORCH_INVALID, format("there are %zu layers with routed experts, not %d", engine->table.map.layers.size(), n));
        }
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) { planner.set_estimated({ layers, layers + n }); });
    });
}

pyorch_status pyorch_estimate(pyorch_engine * engine, int32_t il, const float * state, int32_t n_embd, float * logits, int32_t n_expert) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        std::shared_ptr<const pyorch::Estimator> it;
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) { it = planner.estimator(); });
        if (!it || layer >= it->n_layers || n_embd != it->n_embd || n_expert != it->n_expert) {
            throw Failure(PYORCH_INVALID, format("there is no estimator for layer %d with states of %d values and %d experts", il, n_embd, n_expert));
        }
        std::fill(logits, logits + n_expert, 0.0f);
        it->correct(layer, state, logits);
    });
}

pyorch_status pyorch_set_default_vectors(pyorch_engine * engine, int32_t il, const float * vectors, int32_t n_expert, int32_t n_embd) {
    return guarded([&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, n_expert);
        std::vector<float> copy(vectors, vectors + (size_t) n_expert * n_embd);
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) { planner.set_default_vectors(layer, std::move(copy)); });
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
        pyorch::PrefetchPlanner::Observer shown;
        if (observer) {
            shown = [=](const void * context, int from, const pyorch::Forecast & it) {
                const auto & layers = engine->table.map.layers;
                const std::vector<int32_t> experts(it.experts.begin(), it.experts.end());
                observer(user, context, from < 0 ? -1 : layers[from].il, layers[it.layer].il, experts.data(), (int32_t) experts.size());
            };
        }
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) { planner.set_observer(std::move(shown)); });
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
        engine->speculation.reset_counts();
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

//
// history
//

pyorch_status pyorch_maps_new(int32_t n_layers, int32_t n_expert, int32_t n_embd, int32_t capacity, int32_t distance,
                              int32_t n_requests, pyorch_maps ** maps) {
    return guarded([&] {
        if (n_layers < 1 || n_expert < 1 || n_embd < 0) {
            throw Failure(PYORCH_INVALID, format("there are no expert maps of %d layers of %d experts with embeddings of %d numbers", n_layers, n_expert, n_embd));
        }
        for (auto [what, value] : { std::pair("capacity", capacity), std::pair("prefetch distance", distance), std::pair("number of requests", n_requests) }) {
            if (value < 1) {
                throw Failure(PYORCH_INVALID, format("the %s of expert maps is at least 1, not %d", what, value));
            }
        }
        *maps = new pyorch_maps { std::make_shared<pyorch::ExpertMaps>(n_layers, n_expert, n_embd, capacity, distance, n_requests) };
    });
}

void pyorch_maps_free(pyorch_maps * maps) {
    delete maps;
}

pyorch_status pyorch_maps_add(pyorch_maps * maps, const float * embedding, const float * map) {
    return guarded([&] {
        if (!maps->history->iterations.add(embedding, map)) {
            throw Failure(PYORCH_INVALID, "an expert map, or its embedding, has a value that is not a finite number");
        }
    });
}

pyorch_status pyorch_maps_add_request(pyorch_maps * maps, const float * counts) {
    return guarded([&] {
        if (!maps->history->requests.add(counts)) {
            throw Failure(PYORCH_INVALID, "the counts of a request are finite numbers of 0 or more, and not all 0");
        }
    });
}

pyorch_status pyorch_set_maps(pyorch_engine * engine, pyorch_maps * maps) {
    return guarded([&] {
        const auto & layers = engine->table.map.layers;
        for (const auto & layer : layers) {
            if (maps && maps->history->iterations.n_expert < layer.n_expert) {
                throw Failure(PYORCH_INVALID, format("layer %d has %d experts, the expert maps %d", layer.il, layer.n_expert, maps->history->iterations.n_expert));
            }
        }
        if (maps && maps->history->iterations.n_layers > (int) layers.size()) {
            throw Failure(PYORCH_INVALID, format("the model has %zu layers with routed experts, the expert maps %d", layers.size(), maps->history->iterations.n_layers));
        }
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) { planner.set_maps(maps ? maps->history : nullptr); });
    });
}

pyorch_status pyorch_maps_size(const pyorch_maps * maps, int32_t * n_maps, int32_t * n_requests) {
    return guarded([&] {
        *n_maps     = maps->history->iterations.size();
        *n_requests = maps->history->requests.size();
    });
}

pyorch_status pyorch_maps_export(const pyorch_maps * maps, float * embeddings, float * probs, int32_t * n_maps,
                                 float * requests, int32_t * n_requests) {
    return guarded([&] {
        *n_maps = maps->history->iterations.copy_to(embeddings, probs, *n_maps);
        *n_requests = maps->history->requests.copy_to(requests, *n_requests);
    });
}

pyorch_status pyorch_maps_search(const pyorch_maps * maps, const float * embedding, const float * map, int32_t n_known,
                                 int32_t * index, float * score) {
    return guarded([&] {
        auto & store = maps->history->iterations;
        if (n_known < 0 || n_known > store.n_layers) {
            throw Failure(PYORCH_INVALID, format("an expert map has %d layers, so %d of them cannot be known", store.n_layers, n_known));
        }
        pyorch::ExpertMapSearch search(store);
        pyorch::Match match = search.begin(embedding);
        for (int l = 0; l < n_known; ++l) {
            match = search.observe(map + (size_t) l * store.n_expert, store.n_expert);
        }
        *index = match.index;
        *score = match.score;
    });
}

pyorch_status pyorch_maps_search_request(const pyorch_maps * maps, const float * counts, int32_t * index, float * score) {
    return guarded([&] {
        const pyorch::Match match = maps->history->requests.nearest(counts);
        *index = match.index;
        *score = match.score;
    });
}

//
// replay
//

pyorch_status pyorch_replay(pyorch_engine * engine, const pyorch_recording * recording, const pyorch_replay_config * config,
                            pyorch_replay_result * result, int32_t max_distance, int32_t n_ranks, uint64_t * right, uint64_t * total) {
    return guarded([&] {
        if (!engine->simulated) {
            throw Failure(PYORCH_INVALID, "a replay needs a simulated engine");
        }
        pyorch::check_recording(engine->table.map, *recording, *config);
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) {
            *result = pyorch::replay(engine->table, planner, engine->routers, *recording, *config, { max_distance, n_ranks, right, total });
        });
    });
}

} // extern "C"
