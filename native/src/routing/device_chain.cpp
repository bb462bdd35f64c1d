#include "routing/device_chain.h"

#include "base/status.h"
#include "routing/stages.h"

#include "ggml-backend.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "llama-moe.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

namespace pyorch {
namespace {

void copy_numbers(ggml_tensor * to, const std::vector<int32_t> & numbers) {
    memcpy(to->data, numbers.data(), std::min(ggml_nbytes(to), numbers.size() * sizeof(int32_t)));
}

// [n_used, n_tokens] each, after the route node of their layer.
void slots_op(ggml_tensor * slots, int ith, int, void * user) {
    if (ith == 0) {
        copy_numbers(slots, ((const GraphLayer *) user)->slot_rows);
    }
}

// src[2]: the processor's outputs [n_embd, n_used, n_tokens], contiguous. Sends the needed rows to the device, if they
// are not copied with the graph; also rows between two of them, if that is faster than a call for each.
void rows_op(ggml_tensor * rows, int ith, int, void * user) {
    constexpr size_t   CALL_BYTES = 64 << 10; // sent over a link in the time of one call
    const GraphLayer & g          = *(const GraphLayer *) user;
    if (ith != 0) {
        return;
    }
    copy_numbers(rows, g.joined_rows);
    const ggml_tensor * outputs = rows->src[2];
    for (size_t row = 0; g.zero_copy && row < g.joined_rows.size(); ++row) {
        if (g.joined_rows[row] >= g.batch.n_used) {
            memcpy(g.zero_copy->host + row * outputs->ne[0], (const char *) outputs->data + row * outputs->nb[1],
                outputs->nb[1]);
        }
    }
    const size_t n    = g.landing ? g.joined_rows.size() : 0;
    const auto   next = [&](size_t row) {
        while (row < n && g.joined_rows[row] < g.batch.n_used) {
            ++row;
        }
        return row;
    };
    for (size_t begin = next(0), end; begin < n; begin = end) {
        size_t last = begin;
        for (end = next(last + 1); end < n && (end - last - 1) * outputs->nb[1] < CALL_BYTES; end = next(last + 1)) {
            last = end;
        }
        ggml_backend_tensor_set(g.landing->rows, (const char *) outputs->data + begin * outputs->nb[1],
            begin * outputs->nb[1], (last + 1 - begin) * outputs->nb[1]);
    }
}

bool is_by_processor(const GraphLayer & g) {
    const auto by_processor = [&](int32_t row) { return row >= g.batch.n_used; };
    return std::any_of(g.joined_rows.begin(), g.joined_rows.end(), by_processor);
}

// The same, after the context's last computation in the areas.
void last_rows_op(ggml_tensor * rows, int ith, int nth, void * user) {
    rows_op(rows, ith, nth, user);
    if (ith == 0) {
        Context & context = *((const GraphLayer *) user)->context;
        context.routing.device->release_areas(context.on_device);
    }
}

// Copies the nodes that depend on the experts' matrices. All other nodes serve both paths.
class ChainCopier {
public:
    // slots [n_used, n_tokens]: of the bank, or of an area. Throws Failure if rows are mixed.
    ChainCopier(const ExpertGraph & graph, const DeviceTier & tier, bool in_area, ggml_tensor * slots) :
            graph(graph), tier(tier), in_area(in_area), slots(slots) {
        for (const ExpertNode & node : graph.nodes) {
            copies.push_back(node.by_experts ? make(node) : nullptr);
        }
    }

    ggml_tensor * outputs() const { return copies.back(); }

    // Lets the processor's path read the router's inputs from `from`, and from nowhere else. Returns false if that is
    // impossible; then the path is unchanged.
    bool redirect_inputs(ggml_tensor * from) {
        std::vector<ggml_tensor *> readers;
        for (const ExpertNode & node : graph.nodes) {
            for (int i = 0; i < GGML_MAX_SRC && node.by_experts; ++i) {
                if (node.sources[i] < 0 || graph.nodes[node.sources[i]].kind != ExpertNode::INPUTS) {
                    continue;
                }
                if (!graph.is_experts(node.tensor) || i != 1) {
                    return false;
                }
                readers.push_back(node.tensor);
            }
        }
        for (ggml_tensor * reader : readers) {
            reader->src[1] = from;
        }
        return !readers.empty();
    }

    // The same for the processor's weights: it reads copies in host memory of weights that are on the device.
    void redirect_weights(HostCopies & to) {
        for (const ExpertNode & node : graph.nodes) {
            for (int i = 0; i < GGML_MAX_SRC && node.by_experts; ++i) {
                ggml_tensor *& source = node.tensor->src[i];
                if (source && source->op == GGML_OP_NONE && !(graph.is_experts(node.tensor) && i == 0)) {
                    source = to.of(source);
                }
            }
        }
    }

private:
    const ExpertGraph &        graph;
    const DeviceTier &         tier;
    const bool                 in_area;
    ggml_tensor * const        slots;
    std::vector<ggml_tensor *> copies; // by node; null: the node serves both paths

    ggml_tensor * make(const ExpertNode & node) {
        if (!node.mixes.empty()) {
            throw Failure(PYORCH_INVALID, node.mixes);
        }
        const ggml_tensor * t   = node.tensor;
        ggml_context *      ctx = graph.route.ctx;
        ggml_tensor *       made;
        if (node.kind == ExpertNode::VIEW) {
            made = ggml_view_3d(
                ctx, copies[node.sources[0]], t->ne[0], t->ne[1], t->ne[2], t->nb[1], t->nb[2], node.offset());
        } else if (t->view_src) {
            throw Failure(PYORCH_INVALID, format("%s is written in place", ggml_get_name(t)));
        } else {
            made     = ggml_new_tensor_3d(ctx, t->type, t->ne[0], t->ne[1], t->ne[2]);
            made->op = t->op;
            memcpy(made->op_params, t->op_params, sizeof(made->op_params));
            for (int i = 0; i < GGML_MAX_SRC; ++i) {
                ggml_tensor * const copy = node.sources[i] < 0 ? nullptr : copies[node.sources[i]];
                made->src[i]             = copy ? copy : t->src[i];
            }
            if (graph.is_experts(t)) {
                const int role = managed(t->src[0])->role;
                made->src[0] = in_area ? tier.area(graph.layer, role) : tier.bank(graph.layer).slots(graph.layer, role);
                made->src[2] = slots;
            }
        }
        ggml_format_name(made, "pyorch_device.%s", ggml_get_name(t));
        return made;
    }
};

// behind: a node to compute before, or null.
ggml_tensor * add_numbers(const llama_moe_route & route, GraphLayer & layer, ggml_custom_op_t op, const char * name,
    ggml_tensor * behind = nullptr) {
    // The second argument makes the processor compute it.
    ggml_tensor * args[]  = { route.selected, route.down_exps, behind };
    ggml_tensor * numbers = ggml_custom_4d(route.ctx, GGML_TYPE_I32, route.selected->ne[0], route.selected->ne[1], 1, 1,
        args, behind ? 3 : 2, op, 1, &layer);
    ggml_format_name(numbers, "%s-%d", name, route.il);
    return numbers;
}

// Returns the router's inputs in host memory, [n_embd, 1, n_tokens].
ggml_tensor * add_inputs(const llama_moe_route & route, GraphLayer & layer) {
    ggml_tensor * args[] = { route.selected, route.down_exps };
    ggml_tensor * inputs = ggml_custom_4d(route.ctx, GGML_TYPE_F32, route.inp->ne[0], 1, route.inp->ne[1], 1, args, 2,
        inputs_op, GGML_N_TASKS_MAX, &layer);
    ggml_format_name(inputs, "pyorch_inputs-%d", route.il);
    return inputs;
}

// A node that is a graph part of its own need not wake idle threads.
void ask_one_thread(ggml_tensor * custom) {
    ggml_custom_op_params params;
    memcpy(&params, custom->op_params, sizeof(params));
    params.n_tasks = 1;
    memcpy(custom->op_params, &params, sizeof(params));
}

// ggml's scheduler waits for the device before a part of the processor that has no input of the graph, because it could
// overwrite memory that the device reads. A part with an input of the graph begins at once, with a copy of it. So the
// processor's part gets this input, which has no bytes. The device's sources in host memory are outputs, which nothing
// overwrites: `slots`, and our weights.
ggml_tensor * beside_device(const llama_moe_route & route, const GraphLayer & layer, ggml_tensor * slots) {
    const DeviceTier &  tier = *layer.context->routing.device;
    const ggml_tensor * in   = layer.batch.through_area() ? tier.area(layer.batch.layer, 0) :
                                                            tier.bank(layer.batch.layer).slots(layer.batch.layer, 0);
    ggml_tensor *       none = ggml_new_tensor_1d(route.ctx, GGML_TYPE_I32, 0);
    ggml_backend_tensor_alloc(in->buffer, none, in->data);
    ggml_format_name(none, "pyorch_beside-%d", route.il);
    ggml_set_input(none);
    ggml_set_output(slots);
    if (layer.batch.needs & GRAPH_CHANGES) {
        ggml_set_output(route.weights);
    }
    return none;
}

// Whether kernels accept that a token has a slot twice. Kernels for one token and quantized weights do: they compute
// each row by itself. Kernels that sort rows by expert omit rows, write to wrong places, or end the process:
// mm_ids_helper and ggml_cuda_mul_mat_id of ggml's CUDA.
bool may_repeat(const llama_moe_route & route, const DeviceBank & bank, int layer) {
    const auto & slots = bank.all()[bank.pool_of(layer)].roles;
    return route.selected->ne[1] == 1 && std::all_of(slots.begin(), slots.end(), [](const ggml_tensor * matrix) {
        return matrix && ggml_is_quantized(matrix->type);
    });
}

// Returns an empty view of `what`, to order a node after it.
ggml_tensor * behind(const llama_moe_route & route, ggml_tensor * what) { return ggml_view_1d(route.ctx, what, 0, 0); }

// Returns both numbers of a layer, [2 * n_used, 1], from zero-copy memory. slots: of the processor's path.
ggml_tensor * add_zero_copy_numbers(const llama_moe_route & route, GraphLayer & layer, ggml_tensor * slots) {
    const auto &  from   = *layer.zero_copy;
    ggml_tensor * slots_ = from.tensor(route.ctx, GGML_TYPE_I32, slots->ne, from.numbers);
    ggml_tensor * rows   = from.tensor(route.ctx, GGML_TYPE_I32, slots->ne, from.numbers + slots->ne[0]);
    ggml_tensor * both   = ggml_concat(route.ctx, slots_, rows, 0);
    both->src[2]         = behind(route, slots);
    ggml_format_name(both, "pyorch_numbers-%d", route.il);
    return both;
}

ggml_tensor * half(const llama_moe_route & route, ggml_tensor * numbers, int which) {
    const int64_t n = numbers->ne[0] / 2;
    return ggml_view_2d(route.ctx, numbers, n, 1, numbers->nb[1], which * n * sizeof(int32_t));
}

bool is_last(const GraphLayer & layer) {
    const Context & context = *layer.context;
    return context.routing.device->last_with_area(context.layers) == layer.batch.layer;
}

// Adds a node of the processor after the outputs of the last layer, which frees the areas for waiting contexts. It
// gives its own numbers.
ggml_tensor * release_area(const llama_moe_route & route, ggml_tensor * outputs, GraphLayer & layer) {
    ggml_tensor * number = ggml_view_1d(route.ctx, outputs, 1, 0);
    return ggml_get_rows(route.ctx, outputs, add_numbers(route, layer, last_rows_op, "pyorch_rows", number));
}

// Prints the reason once, for the first layer.
void say_off_device(const llama_moe_route & route, const std::string & why) {
    static std::atomic<bool> said{ false };
    if (!said.exchange(true)) {
        notice(format("note: the experts of block %d stay off the device: %s", route.il, why.c_str()));
    }
}

} // namespace

// Needs that make the processor compute experts of a layer in addition to the device. All experts pass through an area.
constexpr unsigned BESIDE_SLOTS = GRAPH_PROCESSOR | GRAPH_CHANGES;
constexpr unsigned BESIDE_AREA  = GRAPH_OTHERS | GRAPH_CHANGES;

ggml_tensor * add_device_chain(const ExpertGraph & graph, GraphLayer & layer) {
    const llama_moe_route & route = graph.route;
    DeviceTier &            tier  = *layer.context->routing.device;
    const int               at    = layer.batch.layer;
    const bool              whole = tier.is_whole(at);
    const bool              area  = !whole && tier.takes_area(at, (int) route.selected->ne[1], route.decode);
    layer.may_repeat              = may_repeat(route, tier.bank(at), at);
    const int64_t n_least         = layer.may_repeat ? 1 : route.selected->ne[0];
    const int     n_slots         = tier.bank(at).n_slots(at);
    if (!area && n_slots < n_least) {
        if (n_slots > 0 && route.selected->ne[1] == 1) {
            say_off_device(route, format("there is room for %d of them, and a token uses %d", n_slots, (int) n_least));
        }
        return nullptr;
    }
    try {
        ggml_tensor * slots         = add_numbers(route, layer, slots_op, "pyorch_slots");
        const bool    alone         = !layer.batch.has_any(whole ? GRAPH_CHANGES : area ? BESIDE_AREA : BESIDE_SLOTS);
        layer.numbers               = nullptr;
        const ggml_tensor * outputs = graph.nodes.back().tensor;
        if (!alone && layer.may_repeat && outputs->type == GGML_TYPE_F32 && ggml_is_contiguous(outputs)) {
            layer.zero_copy = layer.context->zero_copy_of(at, outputs->ne[0], outputs->ne[1]);
        }
        if (layer.zero_copy) {
            layer.numbers = add_zero_copy_numbers(route, layer, slots);
        }
        ChainCopier   chain(graph, tier, area, layer.numbers ? half(route, layer.numbers, 0) : slots);
        ggml_tensor * on_device = chain.outputs();
        if (!alone) {
            chain.redirect_weights(tier.host_copies);
        }
        layer.batch.way = area ? (alone ? Way::AREA : Way::AREA_BESIDE) : alone ? Way::SLOTS : Way::SLOTS_BESIDE;
        if (alone) {
            ask_one_thread(route.selected);
            return is_last(layer) && area ? release_area(route, on_device, layer) : on_device;
        }
        if (route.inp->type == GGML_TYPE_F32 && ggml_is_contiguous(route.inp) &&
            chain.redirect_inputs(add_inputs(route, layer))) {
            layer.device_inputs = route.inp;
            // Other readers of the router's data, which are not kept, prevent this.
            if (!layer.batch.has_any(~(GRAPH_PROCESSOR | GRAPH_OTHERS)) && !area && tier.brings_behind()) {
                layer.batch.way = Way::SLOTS_OVERLAPPED;
            }
            ask_one_thread(route.selected);
        }
        layer.beside = beside_device(route, layer, slots);
        return on_device;
    } catch (const Failure & failure) {
        layer.batch.way = Way::HOST;
        say_off_device(route, failure.what());
        return nullptr;
    }
}

void compute_in_slots(const ExpertGraph & graph, const DeviceBank & bank) {
    for (const ExpertNode & node : graph.nodes) {
        if (graph.is_experts(node.tensor)) {
            node.tensor->src[0] = bank.slots(graph.layer, managed(node.tensor->src[0])->role);
        }
    }
}

ggml_tensor * join_device_rows(
    const llama_moe_route & route, ggml_tensor * on_device, ggml_tensor * released, GraphLayer & layer) {
    // For contexts that wait for the areas: after the last layer one number says that it was computed.
    const bool    last = layer.batch.through_area() && is_last(layer);
    const int64_t n    = ggml_nelements(released); // 0 in the last layer of a ubatch without wanted outputs
    if (layer.zero_copy) {
        ggml_tensor * sent   = add_numbers(route, layer, rows_op, "pyorch_rows", released);
        ggml_tensor * landed = layer.zero_copy->tensor(route.ctx, GGML_TYPE_F32, released->ne, layer.zero_copy->host);
        ggml_tensor * both   = ggml_concat(route.ctx, on_device, landed, 1);
        both->src[2]         = behind(route, sent);
        both->src[3]         = layer.device_inputs;
        return ggml_get_rows(route.ctx, both, half(route, layer.numbers, 1));
    }
    if (!last && n > 0 && released->type == GGML_TYPE_F32 && ggml_is_contiguous(released)) {
        layer.landing =
            layer.context->landing_of(layer.batch.layer, n, released->ne[0] * released->ne[1] * route.n_ubatch);
    }
    // The device's path is the first source, so that it has begun when the processor begins.
    if (!layer.landing) {
        ggml_tensor * both = ggml_concat(route.ctx, on_device, released, 1);
        ggml_tensor * rows = last ?
            add_numbers(route, layer, last_rows_op, "pyorch_rows", ggml_view_1d(route.ctx, both, 1, 0)) :
            add_numbers(route, layer, rows_op, "pyorch_rows");
        both->src[2]       = layer.device_inputs;
        return ggml_get_rows(route.ctx, both, rows);
    }
    ggml_tensor * rows = add_numbers(route, layer, rows_op, "pyorch_rows", released);
    // A tensor of the device's memory, not a view: so that nodes that read it are computed there.
    ggml_tensor * landed = ggml_new_tensor(route.ctx, GGML_TYPE_F32, GGML_MAX_DIMS, released->ne);
    ggml_backend_tensor_alloc(layer.landing->rows->buffer, landed, layer.landing->rows->data);
    ggml_tensor * both = ggml_concat(route.ctx, on_device, landed, 1);
    both->src[2]       = rows; // a dependency without data: the landed rows are read after they arrive
    both->src[3]       = layer.device_inputs;
    return ggml_get_rows(route.ctx, both, rows);
}

void inputs_op(ggml_tensor * inputs, int ith, int nth, void * user) {
    GraphLayer & g = *(GraphLayer *) user;
    if (ith == 0) {
        g.context->owner.n_threads = nth; // the threads of the experts, which are in the same part of the graph
        if (g.batch.overlaps()) {
            run_stages_beside(*g.context, g.batch);
        }
    }
    if (ith != nth - 1 || !is_by_processor(g)) {
        return;
    }
    if (g.inputs.empty()) {
        ggml_backend_tensor_get(g.device_inputs, inputs->data, 0, ggml_nbytes(inputs));
    } else {
        memcpy(inputs->data, g.inputs.data(), ggml_nbytes(inputs));
    }
}

void fetch_inputs(GraphLayer & g, const float * here) {
    g.inputs.clear();
    const bool in_time =
        g.context->routing.device->bank(g.batch.layer).landings.reads_host; // while the device computes
    if (!g.device_inputs || !is_by_processor(g) || (in_time && !here)) {
        return;
    }
    const int64_t n = ggml_nelements(g.device_inputs);
    if (here) {
        g.inputs.assign(here, here + n);
    } else {
        g.inputs.resize(n);
        ggml_backend_tensor_get(g.device_inputs, g.inputs.data(), 0, ggml_nbytes(g.device_inputs));
    }
}

int threads_of(const ggml_cgraph * graph, int n_threads) {
    const GraphLayer * layer = nullptr;
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        if (node->op == GGML_OP_MUL_MAT) {
            return n_threads;
        }
        ggml_custom_op_params params;
        memcpy(&params, node->op_params, sizeof(params));
        if (node->op == GGML_OP_CUSTOM && params.fun == inputs_op) {
            if (layer) {
                return n_threads;
            }
            layer = (const GraphLayer *) params.userdata;
        }
    }
    // Experts whose outputs are not used are computed too, which is much for a prompt.
    const bool computes = !layer || !layer->batch.on_device() || layer->batch.n_tokens >= Demand::SCAN_TOKENS ||
        !layer->batch.remote.empty() || !layer->jobs.empty() || is_by_processor(*layer);
    return computes ? n_threads : 1;
}

void set_device_rows(GraphLayer & layer, int n_device_slots) {
    const RoutedBatch & batch    = layer.batch;
    const int           n_used   = batch.n_used;
    const int           n_tokens = batch.n_tokens;
    if (batch.alone() && batch.through_area()) { // an expert's slot is its number, and each row has its own place
        layer.slot_rows.assign(batch.experts, batch.experts + (size_t) n_used * n_tokens);
        layer.joined_rows.resize(layer.slot_rows.size());
        for (size_t row = 0; row < layer.joined_rows.size(); ++row) {
            layer.joined_rows[row] = (int32_t) (row % n_used);
        }
        return;
    }
    const std::vector<int> & device_slots = batch.device.slots;
    // Slots without rows, so that no kernel gets more rows for an expert than the model has, and changes its method. If
    // n slots are in use, n_used of the first n + n_used are free, if there are so many.
    const auto           is_slot = [](int slot) { return slot >= 0; };
    const auto           n_taken = std::count_if(device_slots.begin(), device_slots.end(), is_slot);
    std::vector<uint8_t> taken(std::min<size_t>(n_device_slots, n_taken + n_used));
    for (int slot : device_slots) {
        if (slot >= 0 && slot < (int) taken.size()) {
            taken[slot] = 1;
        }
    }
    std::vector<int> idle;
    for (int slot = 0; slot < (int) taken.size(); ++slot) {
        if (!taken[slot]) {
            idle.push_back(slot);
        }
    }
    layer.slot_rows.resize((size_t) n_used * n_tokens);
    layer.joined_rows.resize((size_t) n_used * n_tokens);
    auto ghost = batch.ghosts.begin();
    for (int begin = 0; begin < n_used * n_tokens; begin += n_used) {
        int32_t * const slots = layer.slot_rows.data() + begin;
        int32_t * const rows  = layer.joined_rows.data() + begin;
        for (int i = 0; i < n_used; ++i) {
            // A ghost's output is in the processor's rows, whichever expert its slot names meanwhile.
            const bool is_ghost = ghost != batch.ghosts.end() && *ghost == begin + i;
            ghost += is_ghost;
            slots[i] = is_ghost || device_slots.empty() ? -1 : device_slots[batch.experts[begin + i]];
            // An omitted slot may name an expert again; it is computed once.
            const int first = (int) (std::find(slots, slots + i, slots[i]) - slots);
            rows[i]         = slots[i] < 0 ? n_used + i : first;
            slots[i]        = slots[i] >= 0 && first < i && !batch.alone() ? -1 : slots[i];
        }
        // All other rows use these, or, if there are too few, slots that the token does not use.
        size_t next = 0;
        int    free = 0;
        for (int i = 0; i < n_used; ++i) {
            if (slots[i] >= 0) {
                continue;
            }
            if (next < idle.size()) {
                slots[i] = idle[next];
                next += !layer.may_repeat;
                continue;
            }
            while (std::find(slots, slots + n_used, free) != slots + n_used) {
                ++free;
            }
            slots[i] = free < n_device_slots ? free : 0;
        }
    }
}

} // namespace pyorch
