#include "routing/expert_worker.h"

#include "base/cpu_backend.h"
#include "base/status.h"
#include "routing/expert_graph.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

namespace pyorch {
namespace {

struct Job {
    const ExpertRows & rows;
    GraphLayer &       layer;
};

// ids [1, n_slots]: in place of a route node of a decode.
void ids_op(ggml_tensor * ids, int ith, int nth, void * user) {
    if (ith != 0) {
        return;
    }
    const Job & job = *(const Job *) user;
    memcpy(ids->data, job.rows.expert, job.rows.n_slots * sizeof(int32_t));
    std::vector<int> experts(job.rows.expert, job.rows.expert + job.rows.n_slots);
    std::sort(experts.begin(), experts.end());
    experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
    Context & context       = *job.layer.context;
    context.owner.n_threads = nth;
    context.routing.table.acquire(
        context.owner, job.layer.batch.layer, { experts, experts, job.rows.n_rows, false, false });
}

ggml_tensor * make_step(
    ggml_context * ctx, const ExpertRecipe::Step & step, const std::vector<ggml_tensor *> & made, Job & job) {
    const int64_t n_slots = job.rows.n_slots;
    switch (step.kind) {
    case ExpertNode::LEAF: return step.leaf;
    case ExpertNode::INPUTS:
    case ExpertNode::WEIGHTS: {
        const int64_t n = step.kind == ExpertNode::INPUTS ? step.n : 1;
        ggml_tensor * t = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n, 1, n_slots);
        ggml_set_input(t);
        return t;
    }
    case ExpertNode::IDS: {
        ggml_tensor * ids =
            ggml_custom_4d(ctx, GGML_TYPE_I32, 1, n_slots, 1, 1, nullptr, 0, ids_op, GGML_N_TASKS_MAX, &job);
        ids->extra = &job.layer;
        return ids;
    }
    case ExpertNode::VIEW: {
        ggml_tensor * of = made[step.sources[0]];
        return ggml_view_3d(ctx, of, step.n, 1, n_slots, of->nb[1], of->nb[2], step.offset);
    }
    default: {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, step.type, step.n, 1, n_slots);
        t->op           = step.op;
        memcpy(t->op_params, step.params, sizeof(step.params));
        for (int i = 0; i < GGML_MAX_SRC; ++i) {
            t->src[i] = step.sources[i] < 0 ? nullptr : made[step.sources[i]];
        }
        return t;
    }
    }
}

} // namespace

ExpertWorker::ExpertWorker(Routing & routing, int n_threads) :
        context(this, routing), backend(ggml_backend_dev_init(cpu_backend().device, nullptr)),
        memory(ggml_gallocr_new(ggml_backend_dev_buffer_type(cpu_backend().device))) {
    cpu_backend().set_n_threads(backend.get(), n_threads);
}

ExpertWorker::~ExpertWorker() { context.routing.table.forget(context.owner); }

// All rows of an expert stay together, because kernels depend on their number.
void ExpertWorker::compute(const ExpertRows & rows, float * outputs) {
    if (rows.n_slots <= SLOTS_AT_ONCE) {
        compute_at_once(rows, outputs);
        return;
    }
    std::vector<int> order(rows.n_slots);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return rows.expert[a] < rows.expert[b]; });
    std::vector<int32_t> row, expert;
    std::vector<float>   weight, computed;
    for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
        for (size_t next = begin; next < order.size() && (end == begin || next - begin <= SLOTS_AT_ONCE); end = next) {
            const int e = rows.expert[order[next]];
            while (next < order.size() && rows.expert[order[next]] == e) {
                ++next;
            }
            if (end > begin && next - begin > SLOTS_AT_ONCE) {
                break;
            }
        }
        row.clear();
        expert.clear();
        weight.clear();
        for (size_t i = begin; i < end; ++i) {
            row.push_back(rows.row[order[i]]);
            expert.push_back(rows.expert[order[i]]);
            weight.push_back(rows.weight[order[i]]);
        }
        ExpertRows part    = rows;
        part.n_slots       = (int) (end - begin);
        part.n_rows        = std::min(rows.n_rows, part.n_slots);
        part.row           = row.data();
        part.expert        = expert.data();
        part.weight        = weight.data();
        const size_t n_out = context.routing.remote.layers[rows.layer].n_out;
        computed.resize(part.n_slots * n_out);
        compute_at_once(part, computed.data());
        for (size_t i = begin; i < end; ++i) {
            memcpy(outputs + order[i] * n_out, computed.data() + (i - begin) * n_out, n_out * sizeof(float));
        }
    }
}

void ExpertWorker::compute_at_once(const ExpertRows & rows, float * outputs) {
    context.routing.recipes.with(rows.layer, [&](const ExpertRecipe & recipe) {
        const ggml_init_params     params = { (recipe.steps.size() + 1) * ggml_tensor_overhead() +
                ggml_graph_overhead_custom(2 * recipe.steps.size(), false),
            nullptr, true };
        const ggml_context_ptr     ctx(ggml_init(params));
        Job                        job = { rows, context.at(rows.layer, true) };
        std::vector<ggml_tensor *> made;
        ggml_tensor *              inputs  = nullptr;
        ggml_tensor *              weights = nullptr;
        for (const auto & step : recipe.steps) {
            made.push_back(make_step(ctx.get(), step, made, job));
            if (step.kind == ExpertNode::INPUTS) {
                inputs = made.back();
            } else if (step.kind == ExpertNode::WEIGHTS) {
                weights = made.back();
            }
        }
        ggml_tensor * result = made.back();
        ggml_set_output(result);
        ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 2 * recipe.steps.size(), false);
        ggml_build_forward_expand(graph, result);
        if (!ggml_gallocr_alloc_graph(memory.get(), graph)) {
            throw Failure(PYORCH_MEMORY, format("no memory to compute %d rows", rows.n_slots));
        }
        n_bytes = ggml_gallocr_get_buffer_size(memory.get(), 0);
        for (int s = 0; s < rows.n_slots; ++s) {
            rows.copy_inputs(s, (float *) ((char *) inputs->data + s * inputs->nb[2]));
        }
        if (weights) {
            memcpy(weights->data, rows.weight, rows.n_slots * sizeof(float));
        }
        const ggml_status status = ggml_backend_graph_compute(backend.get(), graph);
        if (!context.routing.table.release(context.owner)) {
            throw Failure(PYORCH_IO, context.owner.error);
        }
        if (status != GGML_STATUS_SUCCESS) {
            throw Failure(PYORCH_IO, "its graph could not be computed");
        }
        memcpy(outputs, result->data, ggml_nbytes(result));
    });
}

} // namespace pyorch
