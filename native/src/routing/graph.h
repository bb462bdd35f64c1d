// The nodes that a managed layer gets in llama.cpp's graph: between router and experts, and behind the experts.

#pragma once

#include "routing/contexts.h"

struct ggml_tensor;
struct llama_moe_route;

namespace pyorch {

// Puts nodes behind the selected ids and their weights. They run the stages, which may change both.
void add_route(llama_moe_route & route, GraphLayer & layer);

// experts [n_embd, n_used, n_tokens] were computed. Returns them, behind a node that gives them back to the table and
// puts in what other servers computed, and where settings use ghosts, one that puts in what these compute.
ggml_tensor * add_release(const llama_moe_route & route, ggml_tensor * experts, GraphLayer & layer);

// Whether the release that the calling thread just ran was of a layer that could not be read. Asked for once: the
// graph ends there, where nothing is held any more.
bool release_failed();

// The layer whose mul_mat_id has these ids; null if they are no route node's.
const GraphLayer * layer_of(const ggml_tensor * ids);

} // namespace pyorch
