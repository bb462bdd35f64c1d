// Plays a recorded routing on the residency table and the prefetch planner, in simulated time.
//
// The table, its policies and the planner are those that run beside llama.cpp. What is modelled is the rest: compute
// takes as long as it is told, and one reader takes what the table orders, in the table's order.

#pragma once

#include "pyorch-replay.h"

#include "prediction/prefetch_planner.h"
#include "device/slot_pools.h"
#include "residency/table.h"

#include <functional>

namespace pyorch {

// Where the outcome of forecasts is counted: [layer][max_distance][n_ranks], or null.
struct RankCounts {
    int        max_distance;
    int        n_ranks;
    uint64_t * right;
    uint64_t * total;
};

// Called before each ubatch with the layer -1, and twice for each layer: when it holds its experts, and when it has
// released them. device: the slots of the device, or null without one. The call may change pins and limits.
using ReplayWatch =
    std::function<void(int64_t ubatch, int layer, Table & table, const Owner & owner, SlotPools * device)>;

// Throws Failure for a recording of another model, or numbers that cannot be.
void check_recording(const ModelMap & map, const pyorch_recording & recording, const pyorch_replay_config & config);

// ends: by ubatch, seconds since the first one began; or null. watch: or none.
pyorch_replay_result replay(Table & table, PrefetchPlanner & planner, const std::vector<Router> & routers,
    const pyorch_recording & recording, const pyorch_replay_config & config, const RankCounts & ranks, double * ends,
    const ReplayWatch & watch = {});

} // namespace pyorch
