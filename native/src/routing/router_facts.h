// Facts of a layer's router from llama.cpp's graph, for code that applies the router itself.

#pragma once

#include "routing/contexts.h"

struct ggml_tensor;
struct llama_moe_route;

namespace pyorch {

// Stores in the engine's routers how the layer chooses its experts, or why it cannot be applied.
void read_router(const llama_moe_route & route, const ManagedTensor & down_exps);

// Returns the input of the router: the experts' input, or the hidden state from which it is projected.
ggml_tensor * router_input(const llama_moe_route & route);

// Returns the residual state before the normalization that makes the router's input, null if the graph has none.
ggml_tensor * residual_of(const llama_moe_route & route);

// Reads how the model turns probabilities into weights, and what else ranks experts.
void read_weighting(const llama_moe_route & route, GraphLayer & layer);

} // namespace pyorch
