#include "routing/graph.h"

#include "base/callback.h"
#include "base/cpu_time.h"
#include "base/status.h"
#include "routing/device_chain.h"
#include "routing/expert_worker.h"
#include "routing/router_facts.h"
#include "routing/stages.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-moe.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>

namespace pyorch {
namespace {

// Set on compute thread 0, and read by the same thread after that node.
thread_local bool failed = false;

// The sources of a route node; all but the ids are contiguous, and null if the graph does not need them. PLACE is a
// weight in the processor's memory: it makes the processor compute our nodes, even if a device could.
enum { SELECTED, PLACE, WEIGHTS, PROBS, LOGITS, INPUT, STATE, RESIDUAL, N_SOURCES };

const float * floats(const ggml_tensor * ids, int source) {
    return ids->src[source] ? (const float *) ids->src[source]->data : nullptr;
}

// ids [n_used, n_tokens], contiguous, from src[0], which may be a view of a wider sort.
void copy_ids(ggml_tensor * ids) {
    const ggml_tensor * selected = ids->src[SELECTED];
    for (int64_t t = 0; t < ids->ne[1]; ++t) {
        memcpy((char *) ids->data + t * ids->nb[1], (const char *) selected->data + t * selected->nb[1],
            ids->ne[0] * sizeof(int32_t));
    }
}

void route_op(ggml_tensor * ids, int ith, int nth, void * user) {
    if (ith != 0) {
        return;
    }
    GraphLayer &  g            = *(GraphLayer *) user;
    RoutedBatch & batch        = g.batch;
    g.context->owner.n_threads = nth;
    copy_ids(ids);
    if (in_callback()) { // the stages would wait for the callback
        failed       = true;
        decode_error = "a callback of an engine cannot decode: decode in another thread, or afterwards";
        return;
    }
    g.requested.assign((const int32_t *) ids->data, (const int32_t *) ids->data + ggml_nelements(ids));
    if (floats(ids, WEIGHTS)) {
        g.weights.assign(floats(ids, WEIGHTS), floats(ids, WEIGHTS) + ggml_nelements(ids));
    }
    batch.clear();
    batch.n_tokens          = (int) ids->ne[1];
    batch.n_used            = (int) ids->ne[0];
    batch.requested         = g.requested.data();
    batch.requested_weights = floats(ids, WEIGHTS);
    batch.probs             = floats(ids, PROBS);
    batch.logits            = floats(ids, LOGITS);
    batch.inputs            = floats(ids, INPUT);
    batch.states            = floats(ids, STATE) ? floats(ids, STATE) : batch.inputs;
    batch.residuals         = floats(ids, RESIDUAL);
    batch.experts           = (int32_t *) ids->data;
    batch.weights           = floats(ids, WEIGHTS) ? g.weights.data() : nullptr;
    run_stages(*g.context, batch);
    g.jobs.clear();
    if (!batch.ghosts.empty()) {
        g.jobs = ghost_jobs(*batch.ghost_layer, batch.requested, batch.ghosts);
    }
    if (batch.alone() && batch.through_area() && batch.device.slots.empty()) { // the graph has no other path
        failed       = true;
        decode_error = "another context has the memory of the device through which this prompt passes";
        return;
    }
    if (batch.on_device()) {
        const DeviceBank & bank = g.context->routing.device->bank(batch.layer);
        set_device_rows(g, batch.through_area() ? batch.n_expert : bank.n_slots(batch.layer));
        for (size_t expert = 0; expert < batch.device.slots.size(); ++expert) {
            if (batch.device.slots[expert] >= 0) {
                batch.elsewhere.resize(batch.n_expert);
                batch.elsewhere[expert] = 1;
            }
        }
        if (g.zero_copy) {
            std::copy(g.slot_rows.begin(), g.slot_rows.end(), g.zero_copy->numbers);
            std::copy(g.joined_rows.begin(), g.joined_rows.end(), g.zero_copy->numbers + g.slot_rows.size());
        }
        fetch_inputs(g, floats(ids, INPUT));
    }
    if (batch.alone() && !g.context->routing.table.release(g.context->owner)) { // no node follows the experts
        failed       = true;
        decode_error = g.context->owner.error;
    }
}

// [1, n_used, n_tokens], after the route node of its layer.
void weights_op(ggml_tensor * weights, int ith, int, void * user) {
    const GraphLayer & g = *(const GraphLayer *) user;
    if (ith == 0) {
        memcpy(weights->data, g.weights.data(), g.weights.size() * sizeof(float));
    }
}

// llama.cpp's warm-up selects every expert, to touch memory and not to read the model: one resident expert is enough.
void warmup_op(ggml_tensor * ids, int ith, int, void * user) {
    if (ith != 0) {
        return;
    }
    GraphLayer & g = *(GraphLayer *) user;
    g.batch.clear();
    g.jobs.clear();
    const int first = g.context->routing.table.map.layers[g.batch.layer].first_there();
    std::fill_n((int32_t *) ids->data, ggml_nelements(ids), first);
    const std::vector<int> one = { first }, nothing;
    g.context->routing.table.acquire(g.context->owner, g.batch.layer, { one, nothing, 1 });
}

// Computes rows that a server did not answer, on another thread, because this one computes a graph. Returns "" or why
// it failed.
std::string compute_here(const GraphLayer & g, const RemoteRows & remote, std::vector<float> & outputs) {
    Routing &    routing = g.context->routing;
    const auto & layers  = routing.remote.layers;
    std::string  why;
    outputs.resize(remote.slots.size() * layers[g.batch.layer].n_out);
    std::thread([&] {
        try {
            const Frame & frame = *remote.frame;
            ExpertWorker(routing, g.context->owner.n_threads)
                .compute(read_compute(frame.data() + sizeof(FrameHeader), frame.size() - sizeof(FrameHeader), layers),
                    outputs.data());
        } catch (const std::exception & failure) {
            why = failure.what();
        }
    }).join();
    return why;
}

// Returns a row of experts [n_embd, n_used, n_tokens].
float * row_of(ggml_tensor * experts, int64_t slot) {
    const int64_t n_used = experts->ne[1];
    return (float *) ((char *) experts->data + slot / n_used * experts->nb[2] + slot % n_used * experts->nb[1]);
}

// Inserts other servers' rows into experts [n_embd, n_used, n_tokens]. Returns "" or why it cannot.
std::string join_remote(GraphLayer & g, ggml_tensor * experts) {
    const uint64_t         begin      = clock_ns();
    RemoteBank &           bank       = g.context->routing.remote;
    uint64_t               n_fallback = 0;
    std::string            why;
    std::deque<RemoteRows> all(g.batch.remote.begin(), g.batch.remote.end());
    for (; !all.empty() && why.empty(); all.pop_front()) {
        RemoteRows         remote = std::move(all.front());
        std::vector<float> outputs;
        if (bank.wait(g.batch.layer, remote)) {
            outputs = std::move(remote.answer->rows);
        } else {
            const std::vector<RemoteRows> again = bank.send_again(g.batch.layer, remote);
            if (!again.empty()) {
                all.insert(all.end(), again.begin(), again.end());
                continue;
            }
            why = compute_here(g, remote, outputs);
            if (!why.empty()) {
                break;
            }
            n_fallback += remote.slots.size();
        }
        const float * row = outputs.data();
        for (int slot : remote.slots) {
            memcpy(row_of(experts, slot), row, experts->ne[0] * sizeof(float));
            row += experts->ne[0];
        }
    }
    g.batch.remote.clear();
    bank.waited(clock_ns() - begin, n_fallback);
    return why;
}

// experts [n_embd, n_used, n_tokens], src[0] the same, src[2] the router's input [n_embd, n_tokens]: inserts the rows
// of ghosts after the servers' answers, and overwrites an answer for such a slot.
void ghosts_op(ggml_tensor * experts, int ith, int nth, void * user) {
    const GraphLayer &         g      = *(const GraphLayer *) user;
    const ggml_tensor *        inputs = experts->src[2];
    const int64_t              n_used = experts->ne[1];
    std::vector<const float *> from;
    std::vector<float *>       to;
    for (size_t i = ith; i < g.jobs.size(); i += nth) {
        from.clear();
        to.clear();
        for (int slot : g.jobs[i].slots) {
            from.push_back((const float *) ((const char *) inputs->data + slot / n_used * inputs->nb[1]));
            to.push_back(row_of(experts, slot));
        }
        g.batch.ghost_layer->compute(g.jobs[i].expert, from, to);
    }
}

// experts [n_embd, n_used, n_tokens], src[0] the same, src[1] their ids.
void release_op(ggml_tensor * experts, int ith, int, void * user) {
    if (ith != 0) {
        return;
    }
    if (experts->data != experts->src[0]->data) {
        memcpy(experts->data, experts->src[0]->data, ggml_nbytes(experts));
    }
    GraphLayer & g       = *(GraphLayer *) user;
    Routing &    routing = g.context->routing;
    // A layer holds nothing while it waits for other servers; otherwise two servers could wait for each other for ever.
    if (!routing.table.release(g.context->owner)) {
        failed       = true;
        decode_error = g.context->owner.error;
        return;
    }
    if (!g.batch.remote.empty()) {
        const std::string why = join_remote(g, experts);
        if (!why.empty()) {
            failed       = true;
            decode_error = why;
            return;
        }
    }
    if (g.batch.has(GRAPH_ALL) && routing.calibration.active() && experts->type == GGML_TYPE_F32 &&
        ggml_is_contiguous(experts)) {
        const ggml_tensor * ids = experts->src[1];
        routing.calibration.add(g.batch.layer, (const int32_t *) ids->data, ggml_nelements(ids),
            (const float *) experts->data, (int) experts->ne[0]);
    }
    if (g.batch.hole >= 0) {
        for (int slot : g.batch.dropped) { // the weight is 0, but the row may hold infinite numbers
            memset(row_of(experts, slot), 0, experts->ne[0] * sizeof(float));
        }
    }
}

ggml_tensor * contiguous(ggml_context * ctx, ggml_tensor * t) { return ggml_is_contiguous(t) ? t : ggml_cont(ctx, t); }

} // namespace

void add_route(llama_moe_route & route, GraphLayer & layer) {
    read_weighting(route, layer);
    layer.batch.needs         = route.warmup ? 0 : layer.context->needs_of((int) route.selected->ne[1]);
    ggml_tensor * const state = router_input(route);
    layer.batch.n_embd        = (int) route.inp->ne[0];
    layer.batch.n_state       = (int) state->ne[0];
    layer.batch.way           = Way::HOST;
    layer.device_inputs = layer.beside = nullptr;
    layer.landing = layer.zero_copy = nullptr;
    ggml_tensor * const residual    = residual_of(route);
    const bool          wants_inputs =
        (layer.batch.needs & GRAPH_INPUTS) || (!residual && (layer.batch.needs & GRAPH_RESIDUALS));
    const auto source = [&](bool wanted, ggml_tensor * t) {
        return wanted && t ? contiguous(route.ctx, t) : nullptr; // a source exists until this node is computed
    };
    // A device's choice for many tokens is a view of all experts sorted; a copy to the host would copy all.
    ggml_tensor * args[N_SOURCES] = {
        layer.context->routing.device ? contiguous(route.ctx, route.selected) : route.selected,
        route.down_exps,
        source(layer.batch.needs & GRAPH_WEIGHTS, route.weights),
        source(layer.batch.needs & GRAPH_PROBS, route.probs),
        source(layer.batch.needs & GRAPH_LOGITS, route.logits),
        source(wants_inputs, route.inp),
        source(wants_inputs && state != route.inp, state),
        source(layer.batch.needs & GRAPH_RESIDUALS, residual),
    };
    const ggml_tensor * selected = route.selected;
    // All tasks: a node that is a graph part of its own gets the number of the experts' threads. (With a device,
    // another node does.)
    route.selected = ggml_custom_4d(route.ctx, GGML_TYPE_I32, selected->ne[0], selected->ne[1], 1, 1, args, N_SOURCES,
        route.warmup ? warmup_op : route_op, GGML_N_TASKS_MAX, &layer);
    ggml_format_name(route.selected, "pyorch_route-%d", route.il);
    route.selected->extra = &layer;
    if (layer.batch.needs & GRAPH_CHANGES) {
        ggml_tensor * after[] = { route.selected, route.down_exps };
        route.weights         = ggml_custom_4d(
            route.ctx, GGML_TYPE_F32, 1, selected->ne[0], selected->ne[1], 1, after, 2, weights_op, 1, &layer);
        ggml_format_name(route.weights, "pyorch_weights-%d", route.il);
    }
}

// Whether the processor computes a node, so that its output is in host memory: operations run where their weights are.
static bool has_host_weights(const ggml_tensor * node) {
    return std::any_of(std::begin(node->src), std::end(node->src), [](const ggml_tensor * source) {
        return source && source->op == GGML_OP_NONE && source->buffer && ggml_backend_buffer_is_host(source->buffer) &&
            ggml_backend_buffer_get_usage(source->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    });
}

ggml_tensor * add_release(const llama_moe_route & route, ggml_tensor * experts, GraphLayer & layer) {
    ggml_tensor * args[]   = { experts, route.selected, route.down_exps, layer.beside };
    ggml_tensor * released = has_host_weights(experts) ?
        ggml_custom_inplace(route.ctx, experts, args + 1, 3, release_op, 1, &layer) :
        ggml_custom_4d(route.ctx, experts->type, experts->ne[0], experts->ne[1], experts->ne[2], 1, args, 4, release_op,
            1, &layer);
    ggml_format_name(released, "pyorch_release-%d", route.il);
    if (!(layer.batch.needs & GRAPH_GHOSTS)) {
        return released;
    }
    ggml_tensor * ghost_args[] = { route.down_exps, route.selected->src[INPUT] };
    ggml_tensor * joined = ggml_custom_inplace(route.ctx, released, ghost_args, 2, ghosts_op, GGML_N_TASKS_MAX, &layer);
    ggml_format_name(joined, "pyorch_ghosts-%d", route.il);
    return joined;
}

const GraphLayer * layer_of(const ggml_tensor * ids) {
    return ids->op == GGML_OP_CUSTOM ? (const GraphLayer *) ids->extra : nullptr;
}

bool release_failed() {
    const bool was = failed;
    failed         = false;
    return was;
}

} // namespace pyorch
