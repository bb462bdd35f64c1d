// The second path through the experts of a layer: on a device, with the experts in its slots.
//
// Both paths are in the graph, and every row takes both. After them, each row is taken from the side of its expert. It
// is selected, not summed: the other side's result for the row is undefined.

#pragma once

#include "routing/contexts.h"
#include "routing/expert_graph.h"

struct ggml_cgraph;
struct ggml_tensor;
struct llama_moe_route;

namespace pyorch {

// Adds the device's path. graph: the experts' nodes of the processor. Returns the device's outputs [n_embd, n_used,
// n_tokens]; layer.batch.alone() says whether it computes all rows. Returns null if it cannot take part, because a node
// on the path mixes rows.
ggml_tensor * add_device_chain(const ExpertGraph & graph, GraphLayer & layer);

// For a layer that is completely on a device: its nodes multiply with the device's matrices, without the host.
void compute_in_slots(const ExpertGraph & graph, const DeviceBank & bank);

// Returns the outputs of both paths, after both are released and the rest of the processor's path is done.
ggml_tensor * join_device_rows(
    const llama_moe_route & route, ggml_tensor * on_device, ggml_tensor * released, GraphLayer & layer);

// Fetches the inputs of all tokens before the device begins, if the processor computes for any and the inputs cannot
// come while the device computes, as with a single queue. here: the inputs in host memory, or null.
void fetch_inputs(GraphLayer & layer, const float * here);

// The first node of the processor's part, [n_embd, 1, n_tokens]: fetches the router's inputs, and runs the remaining
// stages. If the processor computes no row, the inputs are not fetched. The device keeps its copy until both paths are
// joined, so they may be fetched while it computes: one thread fetches them while another one runs the stages.
void inputs_op(ggml_tensor * inputs, int ith, int nth, void * layer);

// Returns the threads for a graph of the processor: one, if it has the experts of one layer and the device computes
// them all.
int threads_of(const ggml_cgraph * graph, int n_threads);

// Sets the numbers that the nodes of the chain read: the slots, and the rows after both paths. A token has no slot
// twice, unless layer.may_repeat. REQUIRES: n_device_slots >= n_used, unless layer.may_repeat.
void set_device_rows(GraphLayer & layer, int n_device_slots);

} // namespace pyorch
