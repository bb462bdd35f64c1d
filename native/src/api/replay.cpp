#include "api/api.h"
#include "replay/replay.h"

using namespace pyorch;

extern "C" {

const pyorch_replay_config pyorch_default_replay_config = [] {
    pyorch_replay_config config  = {};
    config.read_bytes_per_second = 1e9;
    config.n_decoders            = 1;
    config.device_policy         = PYORCH_LEARNED;
    config.device_speed = config.device_prefill_speed = 1;
    return config;
}();

pyorch_status pyorch_simulation_new(
    const pyorch_model_map * map, const pyorch_config * config, pyorch_engine ** engine) {
    return guarded_outside_callbacks(__func__, [&] { *engine = make_engine(map, config, true); });
}

pyorch_status pyorch_replay(pyorch_engine * engine, const pyorch_recording * recording,
    const pyorch_replay_config * config, pyorch_replay_result * result, int32_t max_distance, int32_t n_ranks,
    uint64_t * right, uint64_t * total, double * ends) {
    return guarded_outside_callbacks(__func__, [&] {
        if (!engine->simulated) {
            throw Failure(PYORCH_INVALID, "a replay needs a simulated engine");
        }
        check_recording(engine->table.map, *recording, *config);
        checked_choice(PYORCH_CHOICES_POLICY, config->device_policy, true);
        engine->prefetcher.change([&](PrefetchPlanner & planner) {
            *result = replay(engine->table, planner, engine->routers.all(), *recording, *config,
                { max_distance, n_ranks, right, total }, ends, engine->watch);
        });
    });
}

} // extern "C"
