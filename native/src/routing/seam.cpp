#include "routing/routing.h"

#include "base/barrier.h"
#include "base/cpu_backend.h"
#include "base/placement.h"
#include "base/status.h"
#include "routing/contexts.h"
#include "routing/device_chain.h"
#include "routing/graph.h"
#include "routing/router_facts.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-moe.h"

#include <algorithm>
#include <cstring>
#include <sys/stat.h>

namespace pyorch {
namespace {

thread_local Routing * captured = nullptr;

//
// models
//

bool same_file(int fd, const std::string & path) {
    struct stat a, b;
    return fstat(fd, &a) == 0 && stat(path.c_str(), &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

bool on_weight(const ggml_tensor * meta, int fd, size_t offs, void ** extra) {
    if (!captured) {
        return false;
    }
    const ModelMap &    map   = captured->table.map;
    const ExpertPlace * place = map.find_experts(ggml_get_name(meta));
    if (!place) {
        return false;
    }
    // A draft model has tensors of the same names.
    const ExpertTensor & t = map.layers[place->layer].tensors[place->role];
    if (t.offset != offs || (fd >= 0 && !same_file(fd, map.files[t.file].path))) {
        return false;
    }
    if (fd >= 0) {
        *extra = captured->find(ggml_get_name(meta));
    }
    return true;
}

// Returns the size of a slim model's file as its tensors imply, so that llama.cpp maps the missing part.
size_t on_file_size(int fd, size_t size) {
    const ModelMap * map = captured ? &captured->table.map : nullptr;
    return map && map->slim && same_file(fd, map->files[0].path) ? std::max<size_t>(size, map->files[0].span) : size;
}

void on_weight_freed(const ggml_tensor * weight) {
    Routing * routing = Routing::owner_of(weight->extra);
    if (routing) {
        routing->recipes.forget(((const ManagedTensor *) weight->extra)->layer);
        if (routing->device) {
            routing->device->host_copies.forget();
        }
    }
    if (routing && routing->routers.forget(weight)) {
        routing->prefetcher.forget_routers(); // predictors of other contexts may apply them
    }
}

//
// computing
//

const void * on_address(const ggml_tensor * op, int64_t expert, bool wait) {
    static const Owner      nobody;
    thread_local const char thread = 0;
    const ggml_tensor *     src0   = op->src[0];
    const ManagedTensor *   m      = managed(src0);
    if (!m) {
        return (const char *) src0->data + expert * src0->nb[2];
    }
    const GraphLayer * layer = layer_of(op->src[2]);
    if (layer && (expert == layer->batch.hole || (!layer->batch.elsewhere.empty() && layer->batch.elsewhere[expert]))) {
        return op;
    }
    const Owner * owner = layer ? &layer->context->owner : &nobody;
    // A thread that leaves an expert for later still needs it after it asks for the next one.
    wait |= owner->stream != nullptr;
    return m->routing->table.address(*owner, m->layer, (int) expert, m->role, wait, &thread);
}

bool on_repacked(const ggml_tensor * src0) {
    const ManagedTensor * m = managed(src0);
    return m && m->repacked;
}

bool on_multiply(ggml_tensor * op, const void * matrix, const int32_t * pairs, int64_t n, const void * quantized,
    int thread, int n_threads, int * next_chunk) {
    const ManagedTensor * m = managed(op->src[0]);
    return m &&
        multiply(m->multiplication,
            { op, (const uint8_t *) matrix, pairs, n, (const uint8_t *) quantized, thread, n_threads, next_chunk });
}

bool on_failed() { return release_failed(); }

// Returns rows of the token table as floats; empty if the table is not in host memory.
std::vector<float> embeddings_of(const ggml_tensor * table, const int32_t * tokens, int n_tokens) {
    const auto to_float = table ? ggml_get_type_traits(table->type)->to_float : nullptr;
    const bool is_float = table && table->type == GGML_TYPE_F32;
    if (!tokens || !table || (!to_float && !is_float) || !table->data || !table->buffer ||
        !ggml_backend_buffer_is_host(table->buffer)) {
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

void on_begin(const void * id, const ggml_tensor * tok_embd, const int32_t * tokens, const int32_t * positions,
    uint32_t n_tokens, bool decode) {
    place_thread(true);
    Context * context = find_context(id);
    if (!context) {
        return;
    }
    context->advance(positions, (int) n_tokens);
    context->count_unasked((int) n_tokens, decode);

    Prefetcher & prefetcher = context->routing.prefetcher;
    if (!prefetcher.active()) {
        return;
    }
    IterationBegin begin = { decode, (int) n_tokens, {} };
    if ((prefetcher.needs() & PYORCH_NEEDS_EMBEDDINGS) && decode && n_tokens <= MAX_PREDICTED_TOKENS) {
        begin.embeddings = embeddings_of(tok_embd, tokens, (int) n_tokens);
    }
    prefetcher.begin(id, std::move(begin));
}

//
// building graphs
//

// Whether a graph has no node of ours in a layer: the device has all its experts, and nothing reads the routing.
bool is_unasked(const llama_moe_route & route, const Context & context, int layer) {
    const DeviceTier * const device = context.routing.device;
    const unsigned           seen   = context.needs_of((int) route.selected->ne[1]);
    return device && device->is_whole(layer) && (seen & ~(unsigned) (GRAPH_PROCESSOR | GRAPH_OTHERS)) == 0;
}

void on_route(llama_moe_route * route) {
    const ManagedTensor * m = managed(route->down_exps);
    if (!m) {
        return;
    }
    if (m->routing->device) {
        constexpr int OTHERS = 8; // further contexts that compute one token at a time
        m->routing->device->open(
            (route->n_ubatch + OTHERS) * route->inp->ne[0] * route->selected->ne[0] * sizeof(float));
    }
    Context &    context = open_context(route->context, *m->routing);
    GraphLayer & layer   = context.at(m->layer, route->decode);
    layer.unasked        = is_unasked(*route, context, m->layer);
    if (layer.unasked) {
        layer.batch.n_used = route->warmup ? 0 : (int) route->selected->ne[0];
        return;
    }
    if (!route->warmup) { // a warm-up selects another number of experts
        context.computes(m->layer);
        read_router(*route, *m);
    }
    add_route(*route, layer);
}

ggml_tensor * on_done(const llama_moe_route * route, ggml_tensor * experts) {
    const ManagedTensor * m = managed(route->down_exps);
    if (!m) {
        return experts;
    }
    GraphLayer & layer = open_context(route->context, *m->routing).at(m->layer, route->decode);
    if (layer.unasked) {
        const ExpertGraph graph(*route, m->layer, experts);
        m->routing->recipes.learn(graph); // other servers may request its experts
        compute_in_slots(graph, m->routing->device->bank(m->layer));
        return experts;
    }
    if (route->warmup) {
        return add_release(*route, experts, layer);
    }
    const ExpertGraph  graph(*route, m->layer, experts);
    const LayerShape & shape = m->routing->remote.layers[m->layer];
    layer.batch.portable =
        m->routing->recipes.learn(graph).empty() && route->inp->ne[0] == shape.n_in && experts->ne[0] == shape.n_out;
    ggml_tensor * there = m->routing->device ? add_device_chain(graph, layer) : nullptr;
    if (there && layer.batch.alone()) {
        return there;
    }
    ggml_tensor * released = add_release(*route, experts, layer);
    return there ? join_device_rows(*route, there, released, layer) : released;
}

bool on_stale(const void * id, uint32_t n_tokens, bool decode) {
    Context * context = find_context(id);
    return context && context->look_at_needs((int) n_tokens, decode);
}

// Set once, when the library is loaded: later, another model might be computing. If the kernels lack the hooks, no
// engine can be captured.
const bool hooked = [] {
    static const ggml_cpu_expert_hooks cpu_hooks = { on_address, on_failed, on_repacked, on_multiply,
        adaptive_barrier(), threads_of };
    static const llama_moe_hooks       moe_hooks = { on_weight, on_weight_freed, on_route, on_done, on_stale, on_begin,
        end_context, on_file_size };
    try {
        cpu_backend().set_expert_hooks(&cpu_hooks);
    } catch (const Failure &) {
        return false;
    }
    llama_set_moe_hooks(&moe_hooks);
    return true;
}();

} // namespace

void capture(Routing * routing) {
    if (!hooked) {
        cpu_backend(); // throws the same error again
    }
    captured = routing;
}

} // namespace pyorch
