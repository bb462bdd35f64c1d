// What llama.cpp says of a layer's router, for those who apply it themselves.

#pragma once

#include "routing/contexts.h"

struct ggml_tensor;
struct llama_moe_route;

namespace pyorch {

// Puts into the engine's routers how the layer chooses its experts, or why nobody else can tell.
void read_router(const llama_moe_route & route, const ManagedTensor & down_exps);

// What the router is applied to: the experts' input, or the hidden state that this is projected from.
ggml_tensor * router_input(const llama_moe_route & route);

// The residual state before the normalization that makes the router's input, null where the graph has none.
ggml_tensor * residual_of(const llama_moe_route & route);

// How the model makes weights of probabilities, and what else than them ranks experts.
void read_weighting(const llama_moe_route & route, GraphLayer & layer);

} // namespace pyorch
