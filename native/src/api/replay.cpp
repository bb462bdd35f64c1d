#include "api/api.h"
#include "api/handles.h"
#include "replay/replay.h"

using pyorch::Failure;
using pyorch::guarded;

extern "C" {

pyorch_status pyorch_replay(pyorch_engine * engine, const pyorch_recording * recording, const pyorch_replay_config * config,
                            pyorch_replay_result * result, int32_t max_distance, int32_t n_ranks, uint64_t * right, uint64_t * total) {
    return guarded([&] {
        if (!engine->simulated) {
            throw Failure(PYORCH_INVALID, "a replay needs a simulated engine");
        }
        pyorch::check_recording(engine->table.map, *recording, *config);
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) {
            *result = pyorch::replay(engine->table, planner, engine->routers.all(), *recording, *config, { max_distance, n_ranks, right, total });
        });
    });
}

} // extern "C"
