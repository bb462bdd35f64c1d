// The second way through the experts of a layer: on a device, with those that are in its slots.
//
// Both ways are in the graph, and every row takes both; behind them, each row is taken from the side that its expert is
// on. Taken, not summed: what the other side made of the row may be anything.

#pragma once

#include "routing/contexts.h"
#include "routing/expert_graph.h"

struct ggml_tensor;
struct llama_moe_route;

namespace pyorch {

// graph: of the experts, as the processor is about to compute them. Returns the device's outputs [n_embd, n_used,
// n_tokens]; layer.batch.alone says whether it computes them all. null where it cannot take part: something on the way
// mixes rows.
ggml_tensor * add_device_chain(const ExpertGraph & graph, GraphLayer & layer);

// The outputs of both: there, and released, those of the processor behind whatever else follows on its way.
ggml_tensor * join_device_rows(
    const llama_moe_route & route, ggml_tensor * there, ggml_tensor * released, GraphLayer & layer);

// What the nodes of the chain read of the batch: which slots, and which rows behind both ways. No token names a slot
// twice, unless layer.may_repeat.
// REQUIRES: n_device_slots >= n_used, unless layer.may_repeat.
void set_device_rows(GraphLayer & layer, int n_device_slots);

} // namespace pyorch
