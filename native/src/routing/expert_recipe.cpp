#include "routing/expert_recipe.h"

#include "base/status.h"

#include "ggml-backend.h"
#include "llama-moe.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace pyorch {
namespace {

// Why another server, which has the same model and nothing else, cannot compute it; null: it can.
const char * why_here_only(const ExpertGraph & graph, const ExpertNode & node) {
    const ggml_tensor * t = node.tensor;
    switch (node.kind) {
    case ExpertNode::INPUTS: return t->type == GGML_TYPE_F32 ? nullptr : "is not of 32 bits";
    case ExpertNode::LEAF:
        return t->data && t->buffer && ggml_backend_buffer_is_host(t->buffer) &&
                ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS ?
            nullptr :
            "is no weight in the memory of the processor";
    default:
        return t->op == GGML_OP_MUL_MAT_ID && !graph.is_experts(t) ?
            "multiplies with what other servers may not have, such as an adapter" :
            nullptr;
    }
}

ExpertRecipe::Step step_of(const ExpertNode & node) {
    const ggml_tensor * t    = node.tensor;
    ExpertRecipe::Step  step = { node.kind };
    step.leaf                = node.kind == ExpertNode::LEAF ? node.tensor : nullptr;
    step.op                  = t->op;
    step.type                = t->type;
    step.n                   = t->ne[0];
    step.offset              = node.kind == ExpertNode::VIEW ? node.offset() : 0;
    std::copy(std::begin(node.sources), std::end(node.sources), step.sources);
    memcpy(step.params, t->op_params, sizeof(step.params));
    return step;
}

} // namespace

std::string ExpertRecipes::learn(const ExpertGraph & graph) {
    for (const ExpertNode & node : graph.nodes) {
        if (!node.mixes.empty()) {
            return node.mixes;
        }
        if (const char * why = why_here_only(graph, node)) {
            return format("%s (%s) %s", ggml_get_name(node.tensor), ggml_op_desc(node.tensor), why);
        }
    }
    {
        std::shared_lock<std::shared_mutex> lock(mutex);
        if (recipes.count(graph.layer)) {
            return "";
        }
    }
    ExpertRecipe recipe;
    std::transform(graph.nodes.begin(), graph.nodes.end(), std::back_inserter(recipe.steps), step_of);
    std::lock_guard<std::shared_mutex> lock(mutex);
    recipes.emplace(graph.layer, std::move(recipe));
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
