#include "routing/expert_recipe.h"

#include "base/status.h"
#include "routing/routing.h"

#include "ggml-backend.h"
#include "llama-moe.h"

#include <cstring>

namespace pyorch {
namespace {

// Goes from the outputs to the inputs. What it does not know is refused: a graph that is made otherwise tomorrow must
// not be computed wrongly.
class ChainReader {
public:
    ChainReader(int layer, const llama_moe_route & route) : layer(layer), route(route) {}

    ExpertRecipe recipe;

    int step_of(const ggml_tensor * t) {
        t                = is_inputs(t) ? route.inp : t;
        const auto found = steps.find(t);
        return found != steps.end() ? found->second : steps[t] = add(t);
    }

private:
    const int                          layer;
    const llama_moe_route &            route;
    std::map<const ggml_tensor *, int> steps;

    [[noreturn]] static void refuse(const ggml_tensor * t, const char * why) {
        throw Failure(PYORCH_INVALID, format("%s (%s) %s", ggml_get_name(t), ggml_op_desc(t), why));
    }

    int push(const ExpertRecipe::Step & step) {
        recipe.steps.push_back(step);
        return (int) recipe.steps.size() - 1;
    }

    bool is_inputs(const ggml_tensor * t) const {
        return t == route.inp || (t->op == GGML_OP_RESHAPE && t->src[0] == route.inp);
    }

    // One row for each slot: [n, n_used, n_tokens].
    void check_slots(const ggml_tensor * t) const {
        if (t->ne[1] != route.selected->ne[0] || t->ne[2] != route.selected->ne[1] || t->ne[3] != 1) {
            refuse(t, "has not a row for each expert of a token");
        }
    }

    ExpertRecipe::Kind kind_of(const ggml_tensor * t) const {
        if (is_inputs(t)) {
            if (t->type != GGML_TYPE_F32) {
                refuse(t, "is not of 32 bits");
            }
            return ExpertRecipe::INPUTS;
        }
        return t == route.weights ? ExpertRecipe::WEIGHTS :
            t == route.selected   ? ExpertRecipe::IDS :
            t->op == GGML_OP_NONE ? ExpertRecipe::LEAF :
            t->op == GGML_OP_VIEW ? ExpertRecipe::VIEW :
                                    ExpertRecipe::NODE;
    }

    int add(const ggml_tensor * t) {
        ExpertRecipe::Step step;
        step.kind = kind_of(t);
        step.n    = t->ne[0];
        step.type = t->type;
        switch (step.kind) {
        case ExpertRecipe::LEAF:
            if (!t->data || !t->buffer || !ggml_backend_buffer_is_host(t->buffer) ||
                ggml_backend_buffer_get_usage(t->buffer) != GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
                refuse(t, "is no weight in the memory of the processor");
            }
            step.leaf = const_cast<ggml_tensor *>(t);
            return push(step);
        case ExpertRecipe::VIEW: {
            const ggml_tensor * of = t->src[0];
            check_slots(t);
            check_slots(of);
            step.offset = t->view_offs - (of->view_src ? of->view_offs : 0);
            if (t->nb[1] != of->nb[1] || t->nb[2] != of->nb[2] ||
                step.offset + ggml_row_size(t->type, t->ne[0]) > of->nb[1]) {
                refuse(t, "is no part of each row");
            }
            step.sources = { step_of(of) };
            return push(step);
        }
        case ExpertRecipe::NODE:
            check_slots(t);
            check_node(t);
            step.op = t->op;
            memcpy(step.params, t->op_params, sizeof(step.params));
            for (const ggml_tensor * source : t->src) {
                step.sources.push_back(source ? step_of(source) : -1);
            }
            return push(step);
        default: return push(step);
        }
    }

    void check_node(const ggml_tensor * t) const {
        switch (t->op) {
        case GGML_OP_MUL_MAT_ID: {
            const ManagedTensor * m = managed(t->src[0]);
            if (!m || m->layer != layer || t->src[2] != route.selected) {
                refuse(t, "multiplies with what other servers may not have, such as an adapter");
            }
            return;
        }
        case GGML_OP_ADD_ID:
            if (t->src[2] != route.selected) {
                refuse(t, "adds what does not belong to the experts");
            }
            return;
        case GGML_OP_REPEAT:
            if (!is_inputs(t->src[0])) {
                refuse(t, "repeats something else than the inputs");
            }
            return;
        default:
            if (!works_row_by_row(t->op)) {
                refuse(t, "is not known to work row by row");
            }
        }
    }
};

} // namespace

bool works_row_by_row(ggml_op op) {
    switch (op) {
    case GGML_OP_ADD_ID:
    case GGML_OP_ADD:
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_MUL:
    case GGML_OP_SCALE:
    case GGML_OP_CLAMP:
    case GGML_OP_SQR:
    case GGML_OP_CONT: return true;
    default: return false;
    }
}

std::string ExpertRecipes::learn(int layer, const llama_moe_route & route, const ggml_tensor * experts) {
    ChainReader reader(layer, route);
    try {
        reader.step_of(experts);
    } catch (const Failure & failure) {
        return failure.what();
    }
    {
        std::shared_lock<std::shared_mutex> lock(mutex);
        if (recipes.count(layer)) {
            return "";
        }
    }
    std::lock_guard<std::shared_mutex> lock(mutex);
    recipes.emplace(layer, std::move(reader.recipe));
    return "";
}

void ExpertRecipes::forget(int layer) {
    std::lock_guard<std::shared_mutex> lock(mutex);
    recipes.erase(layer);
}

const ExpertRecipe & ExpertRecipes::known(int layer) const {
    const auto recipe = recipes.find(layer);
    if (recipe == recipes.end()) {
        throw Failure(PYORCH_INVALID, "its model has no context yet that computes this layer as other servers can");
    }
    return recipe->second;
}

} // namespace pyorch
