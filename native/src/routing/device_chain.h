// The second way through the experts of a layer: on a device, with those that are in its slots.
//
// Both ways are in the graph, and every row takes both; behind them, each row is taken from the side that its expert is
// on. Taken, not summed: what the other side made of the row may be anything.

#pragma once

#include "routing/contexts.h"

struct ggml_tensor;
struct llama_moe_route;

namespace pyorch {

// computed [n_embd, n_used, n_tokens]: the outputs, as the processor is about to compute them. Returns the device's;
// layer.alone says whether it computes them all. null where it cannot take part: something on the way mixes rows.
ggml_tensor * add_device_chain(const llama_moe_route & route, ggml_tensor * computed, GraphLayer & layer);

// The outputs of both: there, and released, those of the processor behind whatever else follows on its way.
ggml_tensor * join_device_rows(
    const llama_moe_route & route, ggml_tensor * there, ggml_tensor * released, GraphLayer & layer);

// What the nodes of the chain read: which slots, and which rows behind both ways. experts: of the batch, by slot of it.
// No token names a slot twice, unless layer.may_repeat.
// REQUIRES: n_device_slots >= n_used, unless layer.may_repeat.
void set_device_rows(GraphLayer & layer, const int32_t * experts, int n_used, int n_tokens,
    const std::vector<int> & device_slots, int n_device_slots);

} // namespace pyorch
