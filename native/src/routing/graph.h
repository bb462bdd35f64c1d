// The nodes that a managed layer adds to llama.cpp's graph: between router and experts, and after the experts.

#pragma once

#include "routing/contexts.h"

struct ggml_tensor;
struct llama_moe_route;

namespace pyorch {

// Adds nodes after the selected ids and their weights. They run the stages, which may change both.
void add_route(llama_moe_route & route, GraphLayer & layer);

// Returns the experts' outputs [n_embd, n_used, n_tokens] after a node that releases the experts and inserts the rows
// that other servers computed, and, if settings use ghosts, after a node that inserts the rows of ghosts.
ggml_tensor * add_release(const llama_moe_route & route, ggml_tensor * experts, GraphLayer & layer);

// Whether the last release on the calling thread was of a layer that could not be read. Resets the answer: the graph
// ends there, where nothing is held any more.
bool release_failed();

// Returns the layer whose mul_mat_id has these ids; null if the ids are not from a route node.
const GraphLayer * layer_of(const ggml_tensor * ids);

} // namespace pyorch
