#include "routing/expert_graph.h"

#include "base/status.h"
#include "routing/routing.h"

#include "ggml-backend.h"
#include "llama-moe.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace pyorch {

namespace {

// Operations that compute each row of their outputs from the same row of their sources, except multiplications. Unknown
// ones are refused, so that a graph of a later llama.cpp is not computed wrongly.
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

} // namespace

size_t ExpertNode::offset() const {
    const ggml_tensor * of = tensor->src[0];
    return tensor->view_offs - (of->view_src ? of->view_offs : 0);
}

ExpertGraph::ExpertGraph(const llama_moe_route & route, int layer, ggml_tensor * outputs) : route(route), layer(layer) {
    number_of(outputs);
}

bool ExpertGraph::is_inputs(const ggml_tensor * t) const {
    return t == route.inp || (t->op == GGML_OP_RESHAPE && t->src[0] == route.inp);
}

bool ExpertGraph::is_experts(const ggml_tensor * t) const {
    const ManagedTensor * m = t->op == GGML_OP_MUL_MAT_ID ? managed(t->src[0]) : nullptr;
    return m && m->layer == layer;
}

int ExpertGraph::number_of(ggml_tensor * t) {
    const ggml_tensor * const key   = is_inputs(t) ? route.inp : t; // the inputs and their reshaped form are one node
    const auto                found = numbers.find(key);
    if (found != numbers.end()) {
        return found->second;
    }
    const ExpertNode::Kind kind = is_inputs(t) ? ExpertNode::INPUTS :
        t == route.weights                     ? ExpertNode::WEIGHTS :
        t == route.selected                    ? ExpertNode::IDS :
        t->op == GGML_OP_NONE                  ? ExpertNode::LEAF :
        t->op == GGML_OP_VIEW                  ? ExpertNode::VIEW :
                                                 ExpertNode::NODE;
    ExpertNode             node = { kind, t, {}, is_experts(t), "" };
    std::fill(std::begin(node.sources), std::end(node.sources), -1);
    if (kind == ExpertNode::VIEW || kind == ExpertNode::NODE) {
        for (int i = 0; i < GGML_MAX_SRC; ++i) {
            if (t->src[i]) {
                node.sources[i] = number_of(t->src[i]);
                node.by_experts |= nodes[node.sources[i]].by_experts;
            }
        }
        node.mixes = why_mixed(node);
    }
    nodes.push_back(std::move(node));
    return numbers[key] = (int) nodes.size() - 1;
}

// Whether it has one row for each slot: [n, n_used, n_tokens].
bool ExpertGraph::has_slots(const ggml_tensor * t) const {
    return t->ne[1] == route.selected->ne[0] && t->ne[2] == route.selected->ne[1] && t->ne[3] == 1;
}

std::string ExpertGraph::why_mixed(const ExpertNode & node) const {
    const ggml_tensor * t   = node.tensor;
    const ggml_tensor * of  = t->src[0];
    const char *        why = nullptr;
    if (!has_slots(t) || (t->op == GGML_OP_VIEW && !has_slots(of))) {
        why = "has not a row for each expert of a token";
    } else if (t->op == GGML_OP_VIEW) {
        const bool is_part = t->nb[1] == of->nb[1] && t->nb[2] == of->nb[2] &&
            node.offset() + ggml_row_size(t->type, t->ne[0]) <= of->nb[1];
        why = is_part ? nullptr : "is no part of each row";
    } else if (t->op == GGML_OP_REPEAT) {
        why = is_inputs(of) ? nullptr : "repeats something else than the inputs";
    } else if (t->op == GGML_OP_MUL_MAT_ID || t->op == GGML_OP_ADD_ID) {
        why = t->src[2] == route.selected ? nullptr : "takes what does not belong to the experts";
    } else if (!works_row_by_row(t->op)) {
        why = "is not known to work row by row";
    }
    return why ? format("%s (%s) %s", ggml_get_name(t), ggml_op_desc(t), why) : "";
}

namespace {

// Returns why another server, which has only the same model, cannot compute the node; null if it can.
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
        ReadLock lock(mutex);
        if (recipes.count(graph.layer)) {
            return "";
        }
    }
    ExpertRecipe recipe;
    std::transform(graph.nodes.begin(), graph.nodes.end(), std::back_inserter(recipe.steps), step_of);
    WriteLock lock(mutex);
    recipes.emplace(graph.layer, std::move(recipe));
    return "";
}

void ExpertRecipes::forget(int layer) {
    WriteLock lock(mutex);
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
