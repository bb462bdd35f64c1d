#include "routing/router_facts.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-hparams.h"
#include "llama-moe.h"

#include <cstring>
#include <list>
#include <vector>

namespace pyorch {
namespace {

static_assert((int) PYORCH_GATING_SOFTMAX == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX &&
        (int) PYORCH_GATING_SIGMOID == LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID &&
        (int) PYORCH_GATING_SOFTMAX_SELECTED == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX_WEIGHT &&
        (int) PYORCH_GATING_SQRT_SOFTPLUS == LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS,
    "gating functions are numbered as in llama.cpp");

bool is_on_device(const ggml_tensor * t) { return t && t->buffer && !ggml_backend_buffer_is_host(t->buffer); }

// Returns the floats of a tensor, null if it has another type or size. copies: storage for floats of a device.
const float * floats(const ggml_tensor * t, int64_t n, std::list<std::vector<float>> & copies) {
    if (!t || t->type != GGML_TYPE_F32 || !t->data || !t->buffer || !ggml_is_contiguous(t) || ggml_nelements(t) != n) {
        return nullptr;
    }
    if (!is_on_device(t)) {
        return (const float *) t->data;
    }
    copies.emplace_back(n);
    ggml_backend_tensor_get(t, copies.back().data(), 0, n * sizeof(float));
    return copies.back().data();
}

// Whether the input is norm(x) * weight, as llama.cpp builds an RMS normalization.
bool is_rms_normalization(const ggml_tensor * inp) {
    return inp->op == GGML_OP_MUL && inp->src[0]->op == GGML_OP_RMS_NORM;
}

// The matrix of the router and its input.
struct Applied {
    ggml_tensor * gate;
    ggml_tensor * inp;
};

// Returns both. A model whose experts are narrower than its hidden state computes the logits itself, from the whole
// state, and passes them to build_moe_ffn without the matrix. Null matrix: the logits are computed in another way.
Applied applied(const llama_moe_route & route) {
    const ggml_tensor * logits = route.logits;
    if (!route.gate && logits->op == GGML_OP_MUL_MAT && is_rms_normalization(logits->src[1])) {
        return { logits->src[0], logits->src[1] };
    }
    return { route.gate, route.inp };
}

// Whether the router has no adapter, which would add to the product.
bool is_applied_alone(const llama_moe_route & route, const Applied & router) {
    const ggml_tensor * product = route.gate_b ? route.logits->src[0] : route.logits;
    return product && product->op == GGML_OP_MUL_MAT && product->src[0] == router.gate && product->src[1] == router.inp;
}

// Returns why a router cannot be applied outside of the graph, "" if it can.
std::string why_unknown(const llama_moe_route & route, const Applied & parts, const Router & router) {
    if (!known(router.gating)) {
        return format("layer %d has the gating function %d, which is not known", route.il, route.gating);
    }
    if (!parts.gate) {
        return format("layer %d gets its choice of experts from another part of the model", route.il);
    }
    if (!is_applied_alone(route, parts)) {
        return format("layer %d has a router that an adapter changes", route.il);
    }
    const bool readable =
        router.gate && (!route.gate_b || router.bias) && (!route.selection_b || router.selection_bias);
    return readable ?
        "" :
        format("layer %d has a router of the type %s that is not F32", route.il, ggml_type_name(parts.gate->type));
}

} // namespace

void read_router(const llama_moe_route & route, const ManagedTensor & m) {
    Routers & routers = m.routing->routers;
    if (routers.has_copy(m.layer, route.down_exps)) { // the device was already asked
        return;
    }
    Router                        router;
    std::list<std::vector<float>> copies;
    const Applied                 parts = applied(route);
    router.n_embd                       = (int) parts.inp->ne[0];
    router.n_expert                     = (int) route.logits->ne[0];
    router.n_used                       = (int) route.selected->ne[0];
    router.gating                       = route.gating;
    router.n_groups                     = route.n_groups;
    router.n_groups_used                = route.n_groups_used;
    router.normalized                   = route.norm_w;
    router.scale                        = route.scale;
    router.gate                         = floats(parts.gate, (int64_t) router.n_embd * router.n_expert, copies);
    router.bias                         = floats(route.gate_b, router.n_expert, copies);
    router.selection_bias               = floats(route.selection_b, router.n_expert, copies);
    if (is_rms_normalization(parts.inp)) {
        router.norm = floats(parts.inp->src[1], router.n_embd, copies);
        memcpy(&router.eps, parts.inp->src[0]->op_params, sizeof(router.eps));
    }
    const std::string why = why_unknown(route, parts, router);
    if (!why.empty()) {
        routers.set(m.layer, {}, route.down_exps, why);
    } else if (!copies.empty()) {
        routers.set_copy(m.layer, router, route.down_exps);
    } else {
        routers.set(m.layer, router, route.down_exps);
    }
}

ggml_tensor * router_input(const llama_moe_route & route) { return applied(route).inp; }

ggml_tensor * residual_of(const llama_moe_route & route) {
    const ggml_tensor * inp = router_input(route);
    return is_rms_normalization(inp) ? inp->src[0]->src[0] : nullptr;
}

void read_weighting(const llama_moe_route & route, GraphLayer & layer) {
    layer.batch.softmax_selected = route.gating == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX_WEIGHT;
    layer.batch.normalized       = route.norm_w || layer.batch.softmax_selected;
    if (layer.copies.empty()) {
        layer.batch.selection_bias = floats(route.selection_b, route.logits->ne[0], layer.copies);
    }
}

} // namespace pyorch
