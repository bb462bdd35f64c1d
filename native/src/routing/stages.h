// The stages between the router of a layer and its experts, a list over one batch:
//
//     observe     passes the batch to the observer
//     speculate   replaces the router's choice by the layer's forecast (lossy); or marks the forecast experts, if the
//                 next stage treats the others
//     substitute  replaces absent experts by resident ones or ghosts, or omits them (lossy)
//     place       sends the rows of experts that other servers compute
//     offload     decides which experts a device computes
//     replace     decides which experts it receives for the next time
//     acquire     holds the computed experts, and requests absent ones; replaced experts are requested with the lowest
//                 priority
//     predict     passes the router's choice to the prefetcher
//     upload      uploads to a device what it lacks
//
// Each stage sees the router's choice and the result of the stages before, see RoutedBatch. They run on compute thread
// 0 while the other threads wait. Only upload waits for a disk, for a prompt on a device. acquire() may wait for
// memory that other contexts hold, and speculate and offload for predictions.

#pragma once

#include "routing/contexts.h"
#include "routing/routed_batch.h"

namespace pyorch {

void run_stages(Context & context, RoutedBatch & batch);

// Runs the stages from `replace` on, if batch.overlaps(), while a device computes its experts. The graph already used
// batch.experts, elsewhere and device.slots, and the router's data in host memory are gone: the stages must not change
// or read any of them.
void run_stages_beside(Context & context, RoutedBatch & batch);

} // namespace pyorch
