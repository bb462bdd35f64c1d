#include "routing/seam.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "llama-moe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <sys/stat.h>

namespace pyorch {
namespace {

thread_local const ModelMap * captured_map    = nullptr;
thread_local pyorch_engine *  captured_engine = nullptr;

// Set by the release of a layer that could not be read, on compute thread 0, and asked for by the
// same thread after that very node. So the graph ends where nothing is held any more.
thread_local bool decode_failed = false;

const ManagedTensor * managed(const ggml_tensor * t) {
    const auto * m = t ? (const ManagedTensor *) t->extra : nullptr;
    return m && m->magic == ManagedTensor::MAGIC ? m : nullptr;
}

//
// loading
//

bool same_file(int fd, const std::string & path) {
    struct stat a, b;
    return fstat(fd, &a) == 0 && stat(path.c_str(), &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

bool on_weight(const ggml_tensor * meta, int fd, size_t offs, void ** extra) {
    if (!captured_map) {
        return false;
    }
    for (size_t i = 0; i < captured_map->layers.size(); ++i) {
        for (const auto & t : captured_map->layers[i].tensors) {
            if (t.name != ggml_get_name(meta)) {
                continue;
            }
            // A draft model has tensors of the same names.
            if (t.offset != offs || (fd >= 0 && !same_file(fd, captured_map->files[t.file].path))) {
                return false;
            }
            if (captured_engine && fd >= 0) {
                *extra = captured_engine->find(ggml_get_name(meta));
            }
            return true;
        }
    }
    return false;
}

//
// computing
//

const void * on_address(const ggml_tensor * src0, int64_t expert, bool wait) {
    const ManagedTensor * m = managed(src0);
    if (!m) {
        return (const char *) src0->data + expert * src0->nb[2];
    }
    return m->engine->table.address(m->layer, (int) expert, m->role, wait);
}

bool on_failed() {
    const bool failed = decode_failed;
    decode_failed = false;
    return failed;
}

// The sources of a route node, all but the ids contiguous.
enum { SELECTED, WEIGHTS, PROBS, LOGITS, INPUT, RESIDUAL };

const float * floats(const ggml_tensor * ids, int source) {
    return (const float *) ids->src[source]->data;
}

void observe(pyorch_engine & engine, const GraphLayer & g, const ggml_tensor * ids) {
    std::lock_guard<std::mutex> lock(engine.observer_mutex);
    if (!engine.observer) {
        return;
    }
    pyorch_routing routing;
    routing.context       = g.context;
    routing.il            = engine.table.map.layers[g.layer].il;
    routing.decode        = g.decode;
    routing.n_tokens      = (int32_t) ids->ne[1];
    routing.n_expert      = engine.table.map.layers[g.layer].n_expert;
    routing.n_expert_used = (int32_t) ids->ne[0];
    routing.n_embd        = (int32_t) ids->src[INPUT]->ne[0];
    routing.experts       = (const int32_t *) ids->data;
    routing.weights       = floats(ids, WEIGHTS);
    routing.probs         = floats(ids, PROBS);
    routing.logits        = floats(ids, LOGITS);
    routing.inputs        = floats(ids, INPUT);
    routing.residuals     = ids->src[RESIDUAL] ? floats(ids, RESIDUAL) : nullptr;
    engine.observer(engine.observer_user, &routing);
}

// What may be changed of a routing: the ids in place, the weights in g.new_weights. resident: [n_expert], or null.
RoutedBatch routed_batch(GraphLayer & g, ggml_tensor * ids, const uint8_t * resident) {
    const float * weights = floats(ids, WEIGHTS);
    g.new_weights.assign(weights, weights + ggml_nelements(ids));
    return {
        (int) ids->ne[1], g.engine->table.map.layers[g.layer].n_expert, (int) ids->ne[0], (int32_t *) ids->data,
        g.new_weights.data(), floats(ids, PROBS), floats(ids, LOGITS), resident, g.normalized, g.softmax_selected,
    };
}

// Lets other experts take the places of absent ones, if that is allowed.
void substitute(GraphLayer & g, ggml_tensor * ids) {
    pyorch_engine & engine = *g.engine;
    if (!engine.substitutions.active(g.layer, g.decode)) {
        return;
    }
    thread_local std::vector<uint8_t> resident;
    engine.table.resident(g.layer, resident);
    const MoeLayer & layer = engine.table.map.layers[g.layer];
    engine.substitutions.apply(g.layer, layer.il, routed_batch(g, ids, resident.data()), layer.slot_bytes(), engine.table.read_bytes_per_second());
}

// ids [n_expert_used, n_tokens], contiguous, from src[0], which may be a view of a wider sort
void copy_ids(ggml_tensor * ids) {
    const ggml_tensor * selected = ids->src[0];
    for (int64_t t = 0; t < ids->ne[1]; ++t) {
        memcpy((char *) ids->data + t * ids->nb[1], (const char *) selected->data + t * selected->nb[1], ids->ne[0] * sizeof(int32_t));
    }
}

void copy_floats(const ggml_tensor * from, std::vector<float> & to) {
    const float * data = (const float *) from->data;
    to.assign(data, data + ggml_nelements(from));
}

// The probabilities of each token with the sum 1, whatever the model makes of its logits.
void copy_distribution(const ggml_tensor * probs, const GraphLayer & g, std::vector<float> & to) {
    copy_floats(probs, to);
    const size_t n_expert = g.engine->table.map.layers[g.layer].n_expert;
    for (size_t begin = 0; begin < to.size(); begin += n_expert) {
        float * row = to.data() + begin;
        if (g.softmax_selected) {
            const float most = *std::max_element(row, row + n_expert);
            std::transform(row, row + n_expert, row, [&](float logit) { return std::exp(logit - most); });
        }
        const float sum = std::accumulate(row, row + n_expert, 0.0f);
        std::transform(row, row + n_expert, row, [&](float p) { return p / sum; });
    }
}

// Whether this ubatch computes what is forecast. Without a predictor nothing is, and nobody would make it.
bool speculative(const GraphLayer & g) {
    return g.engine->speculation.active(g.decode) && g.engine->prefetcher.active();
}

// Shows the prefetcher what was routed, and computes next.
void predict(const GraphLayer & g, const ggml_tensor * ids) {
    Prefetcher &   prefetcher = g.engine->prefetcher;
    const unsigned needs      = prefetcher.needs();
    const bool     speculates = speculative(g);
    const bool     predicts   = g.decode && ids->ne[1] <= MAX_PREDICTED_TOKENS && prefetcher.wants();
    if (!speculates && !predicts && !(prefetcher.active() && !g.decode && (needs & NEEDS_PREFILL))) {
        return;
    }
    RoutedLayer layer;
    layer.layer    = g.layer;
    layer.n_tokens = (int) ids->ne[1];
    layer.n_used   = (int) ids->ne[0];
    layer.decode   = g.decode;
    const int32_t * experts = (const int32_t *) ids->data;
    layer.experts.assign(experts, experts + ggml_nelements(ids));
    if (speculates || predicts) {
        const float * weights = g.new_weights.empty() ? floats(ids, WEIGHTS) : g.new_weights.data();
        layer.weights.assign(weights, weights + ggml_nelements(ids));
        if ((needs & NEEDS_RESIDUALS) && ids->src[RESIDUAL]) {
            copy_floats(ids->src[RESIDUAL], layer.residuals);
        }
        if ((needs & NEEDS_INPUTS) || ((needs & NEEDS_RESIDUALS) && !ids->src[RESIDUAL])) {
            copy_floats(ids->src[INPUT], layer.inputs);
        }
        if (needs & NEEDS_PROBS) {
            copy_distribution(ids->src[PROBS], g, layer.probs);
        }
    }
    prefetcher.routed(g.context, std::move(layer));
}

// Puts what was forecast for this layer in the place of what its router chose.
void speculate(GraphLayer & g, ggml_tensor * ids) {
    pyorch_engine & engine = *g.engine;
    engine.speculation.apply(routed_batch(g, ids, nullptr), g.layer > 0 ? engine.prefetcher.next_forecasts(g.context, g.layer) : std::vector<Forecast>());
}

void route_op(ggml_tensor * ids, int ith, int, void * user) {
    if (ith != 0) {
        return;
    }
    GraphLayer & g = *(GraphLayer *) user;
    copy_ids(ids);
    observe(*g.engine, g, ids);
    g.new_weights.clear();
    if (speculative(g)) {
        speculate(g, ids);
    } else {
        substitute(g, ids);
    }

    const int32_t * begin = (const int32_t *) ids->data;
    thread_local std::vector<int> experts;
    experts.assign(begin, begin + ggml_nelements(ids));
    std::sort(experts.begin(), experts.end());
    experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
    g.engine->table.acquire(*g.owner, g.layer, { experts, experts, (int) ids->ne[1] });
    predict(g, ids);
}

// weights in place, after the route node of its layer
void weights_op(ggml_tensor * weights, int ith, int, void * user) {
    const GraphLayer & g = *(const GraphLayer *) user;
    if (ith == 0 && !g.new_weights.empty()) {
        memcpy(weights->data, g.new_weights.data(), g.new_weights.size() * sizeof(float));
    }
}

// llama.cpp's warm-up selects every expert. It wants the memory touched, not the model read: one expert does.
void warmup_op(ggml_tensor * ids, int ith, int, void * user) {
    if (ith != 0) {
        return;
    }
    const GraphLayer & g = *(const GraphLayer *) user;
    memset(ids->data, 0, ggml_nbytes(ids));
    static const std::vector<int> first = { 0 };
    g.engine->table.acquire(*g.owner, g.layer, { first, first, 1 });
}

// experts [n_embd, n_used, n_tokens], src[1] their ids
void release_op(ggml_tensor * experts, int ith, int, void * user) {
    if (ith != 0) {
        return;
    }
    const GraphLayer & g = *(const GraphLayer *) user;
    if (g.engine->calibration.active() && experts->type == GGML_TYPE_F32 && ggml_is_contiguous(experts)) {
        const ggml_tensor * ids = experts->src[1];
        g.engine->calibration.add(g.layer, (const int32_t *) ids->data, ggml_nelements(ids), (const float *) experts->data, (int) experts->ne[0]);
    }
    // After the last layer the model may be freed, and predictors read its routers.
    if (g.layer + 1 == (int) g.engine->table.map.layers.size() && (g.engine->prefetcher.needs() & NEEDS_ROUTERS)) {
        g.engine->prefetcher.settle(g.context);
    }
    if (!g.engine->table.release(*g.owner)) {
        decode_failed = true;
    }
}

//
// beginning
//

// Which engine a context computes with, and whether its last ubatch was of a prompt.
struct ContextState {
    pyorch_engine * engine;
    bool            prefill = false;
};

std::mutex                           contexts_mutex;
std::map<const void *, ContextState> contexts;

void remember(const void * context, pyorch_engine * engine) {
    std::lock_guard<std::mutex> lock(contexts_mutex);
    ContextState & state = contexts[context];
    if (state.engine != engine) {
        state = { engine, false };
    }
}

// Rows of the token table, as floats. Empty where it is out of reach.
std::vector<float> embeddings_of(const ggml_tensor * table, const int32_t * tokens, int n_tokens) {
    const auto to_float = table ? ggml_get_type_traits(table->type)->to_float : nullptr;
    const bool is_float = table && table->type == GGML_TYPE_F32;
    if (!tokens || !table || (!to_float && !is_float) || !table->data || !table->buffer || !ggml_backend_buffer_is_host(table->buffer)) {
        return {};
    }
    std::vector<float> rows((size_t) n_tokens * table->ne[0]);
    for (int t = 0; t < n_tokens; ++t) {
        const char * row = (const char *) table->data + tokens[t] * table->nb[1];
        float *      to  = rows.data() + (size_t) t * table->ne[0];
        if (is_float) {
            memcpy(to, row, table->ne[0] * sizeof(float));
        } else {
            to_float(row, to, table->ne[0]);
        }
    }
    return rows;
}

void on_begin(ggml_backend_sched_t sched, const ggml_tensor * tok_embd, const int32_t * tokens, uint32_t n_tokens, bool decode) {
    pyorch_engine * engine;
    bool            request;
    {
        std::lock_guard<std::mutex> lock(contexts_mutex);
        const auto it = contexts.find(sched);
        if (it == contexts.end()) {
            return;
        }
        engine  = it->second.engine;
        request = !decode && !it->second.prefill;
        it->second.prefill = !decode;
    }
    if (!engine->prefetcher.active()) {
        return;
    }
    IterationBegin begin = { request, decode, (int) n_tokens, {} };
    if ((engine->prefetcher.needs() & NEEDS_EMBEDDINGS) && decode && n_tokens <= MAX_PREDICTED_TOKENS) {
        begin.embeddings = embeddings_of(tok_embd, tokens, (int) n_tokens);
    }
    engine->prefetcher.begin(sched, std::move(begin));
}

//
// building graphs
//

ggml_tensor * contiguous(ggml_context * ctx, ggml_tensor * t) {
    return ggml_is_contiguous(t) ? t : ggml_cont(ctx, t);
}

const float * host_floats(const ggml_tensor * t, int64_t n) {
    const bool readable = t && t->type == GGML_TYPE_F32 && t->data && t->buffer && ggml_backend_buffer_is_host(t->buffer) &&
        ggml_is_contiguous(t) && ggml_nelements(t) == n;
    return readable ? (const float *) t->data : nullptr;
}

// The weights behind a layer's choice, read off the graph. Empty where it is built in another way, or with an adapter.
RouterWeights router_weights(const llama_moe_route & route) {
    RouterWeights router;
    router.n_embd   = (int) route.inp->ne[0];
    router.n_expert = (int) route.logits->ne[0];
    const ggml_tensor * product = route.logits;
    if (product->op == GGML_OP_ADD) {
        router.bias = host_floats(product->src[1], router.n_expert);
        product     = router.bias ? product->src[0] : nullptr;
    }
    if (!product || product->op != GGML_OP_MUL_MAT || product->src[1] != route.inp) {
        return {};
    }
    router.gate = host_floats(product->src[0], (int64_t) router.n_embd * router.n_expert);
    if (route.inp->op == GGML_OP_MUL && route.inp->src[0]->op == GGML_OP_RMS_NORM) {
        router.norm = host_floats(route.inp->src[1], router.n_embd);
        router.eps  = ggml_get_op_params_f32(route.inp->src[0], 0);
    }
    const ggml_tensor * probs = route.probs->src[0] ? route.probs->src[0] : route.probs; // behind the reshape
    router.sigmoid = probs->op == GGML_OP_UNARY;
    const ggml_tensor * sorted = route.selected->src[0]; // behind the view of the top k
    if (sorted && sorted->op == GGML_OP_ARGSORT && sorted->src[0]->op == GGML_OP_ADD) {
        router.choice = host_floats(sorted->src[0]->src[1], router.n_expert);
    }
    return router;
}

void on_route(llama_moe_route * route) {
    const ManagedTensor * m = managed(route->down_exps);
    if (!m) {
        return;
    }
    GraphLayer * g = m->engine->graph_layer(route->sched, m->layer, route->decode);
    remember(route->sched, m->engine);
    g->normalized       = route->normalized;
    g->softmax_selected = route->softmax_selected;

    {
        std::lock_guard<std::mutex> lock(m->engine->routers_mutex);
        m->engine->routers[m->layer] = router_weights(*route);
    }

    ggml_tensor * args[] = {
        route->selected,
        contiguous(route->ctx, route->weights),
        contiguous(route->ctx, route->probs),
        contiguous(route->ctx, route->logits),
        contiguous(route->ctx, route->inp),
        nullptr,
    };
    // Before the router's normalization. As a source it is kept until this node is computed.
    const bool normalized = route->inp->op == GGML_OP_MUL && route->inp->src[0]->op == GGML_OP_RMS_NORM;
    args[RESIDUAL] = normalized ? contiguous(route->ctx, route->inp->src[0]->src[0]) : nullptr;
    ggml_tensor * selected = route->selected;
    route->selected = ggml_custom_4d(route->ctx, GGML_TYPE_I32, selected->ne[0], selected->ne[1], 1, 1,
        args, args[RESIDUAL] ? 6 : 5, route->warmup ? warmup_op : route_op, 1, g);
    ggml_format_name(route->selected, "pyorch_route-%d", route->il);
    if (!route->warmup) {
        route->weights = ggml_custom_inplace(route->ctx, args[WEIGHTS], &route->selected, 1, weights_op, 1, g);
        ggml_format_name(route->weights, "pyorch_weights-%d", route->il);
    }
}

ggml_tensor * on_done(const llama_moe_route * route, ggml_tensor * experts) {
    const ManagedTensor * m = managed(route->down_exps);
    if (!m) {
        return experts;
    }
    GraphLayer * g = m->engine->graph_layer(route->sched, m->layer, route->decode);
    ggml_tensor * args[] = { route->selected };
    ggml_tensor * res = ggml_custom_inplace(route->ctx, experts, args, 1, release_op, 1, g);
    ggml_format_name(res, "pyorch_release-%d", route->il);
    return res;
}

// Set once, when the library is loaded: later, another model might be computing.
const bool hooked = [] {
    static const ggml_cpu_expert_hooks cpu_hooks = { on_address, on_failed };
    static const llama_moe_hooks       moe_hooks = { on_weight, on_route, on_done, on_begin };
    ggml_cpu_set_expert_hooks(&cpu_hooks);
    llama_set_moe_hooks(&moe_hooks);
    return true;
}();

} // namespace

void forget(const pyorch_engine * engine) {
    std::lock_guard<std::mutex> lock(contexts_mutex);
    for (auto it = contexts.begin(); it != contexts.end();) {
        it = it->second.engine == engine ? contexts.erase(it) : std::next(it);
    }
}

void capture(const ModelMap * map, pyorch_engine * engine) {
    captured_map    = map;
    captured_engine = engine;
}

} // namespace pyorch
