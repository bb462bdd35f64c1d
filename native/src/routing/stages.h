// What happens between the router of a layer and its experts: a list of stages over one batch.
//
//     observe     shows the batch to the observer
//     speculate   puts what was forecast for the layer in the place of what its router asked for (lossy); or marks it,
//                 where the next stage treats what was not forecast
//     substitute  lets resident experts or ghosts stand in for absent ones, or leaves them out (lossy)
//     place       sends the rows of experts that other servers compute
//     offload     says which of them a device computes
//     replace     and what comes to it for the next time
//     acquire     holds the experts that are computed, and orders those that are absent; those that others stand in
//                 for when nothing else is wanted
//     predict     shows the prefetcher what the router asked for
//     upload      brings to a device what it lacks
//
// Each sees what the router asked for and what the stages before it made of that, see RoutedBatch. They run on compute
// thread 0, while the other threads wait: none of them waits for a disk, but acquire() may wait for memory that other
// contexts hold, and speculate and offload for predictions.

#pragma once

#include "routing/contexts.h"
#include "routing/routed_batch.h"

namespace pyorch {

void run_stages(Context & context, RoutedBatch & batch);

// Those from `replace` on, where batch.overlaps(): while a device computes what it has. The graph went by batch.experts,
// elsewhere and device.slots already, and what it brought to host memory for the router is gone: none of them is changed
// or read.
void run_stages_beside(Context & context, RoutedBatch & batch);

} // namespace pyorch
