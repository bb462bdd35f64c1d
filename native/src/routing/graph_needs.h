// What graphs bring to host memory from layers whose dense part a device computes.
//
// The choice of the router comes always: it says which experts to bring. All else is brought for those who look at it,
// or where something else may be computed than what was chosen, or by the processor; and a graph holds what was wanted
// when it was built. Where that changes, the next ubatch has another graph.

#pragma once

#include "routing/routing.h"

namespace pyorch {

enum : unsigned {
    GRAPH_WEIGHTS   = 1, // of the experts chosen
    GRAPH_PROBS     = 2,
    GRAPH_LOGITS    = 4,
    GRAPH_INPUTS    = 8,  // of the router
    GRAPH_RESIDUALS = 16, // that they are the normalization of; where there are none, the inputs
    GRAPH_CHANGES   = 32, // other experts, or other weights, may be put in place of the chosen
    GRAPH_PROCESSOR = 64, // the processor may compute experts
    GRAPH_ALL       = 127,
};

// As of now. Without a device: all, for nothing has a way to go.
unsigned graph_needs(const Routing & routing);

} // namespace pyorch
