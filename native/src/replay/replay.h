// Replays a recorded routing on the residency table and the prefetch planner, in simulated time.
//
// The table, its policies and the planner are the ones that run with llama.cpp. The rest is a model: computing takes
// configured times, and one reader serves the table's orders in sequence.

#pragma once

#include "pyorch-replay.h"

#include "prediction/prefetch_planner.h"
#include "device/slot_pools.h"
#include "residency/table.h"

#include <functional>

namespace pyorch {

// Counters of right and all forecasts: [layer][max_distance][n_ranks], or null.
struct RankCounts {
    int        max_distance;
    int        n_ranks;
    uint64_t * right;
    uint64_t * total;
};

// Called before each ubatch with the layer -1, and twice for each layer: after it has taken its experts, and after it
// has released them. device: the slots of the device, null without one. The call may change pins and limits.
using ReplayWatch =
    std::function<void(int64_t ubatch, int layer, Table & table, const Owner & owner, SlotPools * device)>;

// Throws Failure if the recording is of another model, or a number is out of range.
void check_recording(const ModelMap & map, const pyorch_recording & recording, const pyorch_replay_config & config);

// ends: receives for each ubatch the seconds since the first one began; or null. watch: may be empty.
pyorch_replay_result replay(Table & table, PrefetchPlanner & planner, const std::vector<Router> & routers,
    const pyorch_recording & recording, const pyorch_replay_config & config, const RankCounts & ranks, double * ends,
    const ReplayWatch & watch = {});

} // namespace pyorch
