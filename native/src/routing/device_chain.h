// The second way through the experts of a layer: on a device, with those that are in its slots.
//
// Both ways are in the graph, and every row takes both; behind them, each row is taken from the side that its expert is
// on. Taken, not summed: what the other side made of the row may be anything.

#pragma once

#include "routing/contexts.h"
#include "routing/expert_graph.h"

struct ggml_cgraph;
struct ggml_tensor;
struct llama_moe_route;

namespace pyorch {

// graph: of the experts, as the processor is about to compute them. Returns the device's outputs [n_embd, n_used,
// n_tokens]; layer.batch.alone() says whether it computes them all. null where it cannot take part: something on the way
// mixes rows.
ggml_tensor * add_device_chain(const ExpertGraph & graph, GraphLayer & layer);

// A layer that is wholly on a device: its nodes multiply with what lies there, and the host is not asked.
void compute_in_slots(const ExpertGraph & graph, const DeviceBank & bank);

// The outputs of both: there, and released, those of the processor behind whatever else follows on its way.
ggml_tensor * join_device_rows(
    const llama_moe_route & route, ggml_tensor * there, ggml_tensor * released, GraphLayer & layer);

// Before the device begins: of all tokens, where the processor computes for any, and they cannot come while the device
// computes, as where one queue has all that a device is asked. here: in host memory, null: they are not.
void fetch_inputs(GraphLayer & layer, const float * here);

// The first node of the processor's part, [n_embd, 1, n_tokens]: the router's inputs, and what stages are left. Where the
// processor computes no row, nobody reads them. What the device has of them stays until both ways are joined, so they
// may come while it computes, and then one thread fetches them while another sees to the rest.
void inputs_op(ggml_tensor * inputs, int ith, int nth, void * layer);

// How many threads compute a graph of the processor's: one, where it has the experts of one layer and the device computes
// them all.
int threads_of(const ggml_cgraph * graph, int n_threads);

// What the nodes of the chain read of the batch: which slots, and which rows behind both ways. No token names a slot
// twice, unless layer.may_repeat.
// REQUIRES: n_device_slots >= n_used, unless layer.may_repeat.
void set_device_rows(GraphLayer & layer, int n_device_slots);

} // namespace pyorch
