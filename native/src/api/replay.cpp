#include "api/api.h"
#include "api/choices.h"
#include "api/handles.h"
#include "api/structs.h"
#include "replay/replay.h"

using pyorch::Failure;
using pyorch::guarded;
using pyorch::guarded_outside_callbacks;

namespace {

// A disk of 1 GB/s and a processor that takes no time.
pyorch_replay_config default_config() {
    pyorch_replay_config config  = {};
    config.read_bytes_per_second = 1e9;
    config.n_decoders            = 1;
    config.device_policy         = PYORCH_LEARNED;
    config.device_speed = config.device_prefill_speed = 1;
    return config;
}

} // namespace

extern "C" {

pyorch_status pyorch_simulation_new(
    const pyorch_model_map * map, const pyorch_config * config, pyorch_engine ** engine) {
    return guarded_outside_callbacks(__func__, [&] { *engine = pyorch::make_engine(map, config, true); });
}

pyorch_status pyorch_recording_default(pyorch_recording * recording, uint64_t struct_size) {
    return guarded([&] { pyorch::write_default(recording, struct_size, "pyorch_recording", pyorch_recording{}); });
}

pyorch_status pyorch_replay_config_default(pyorch_replay_config * config, uint64_t struct_size) {
    return guarded([&] { pyorch::write_default(config, struct_size, "pyorch_replay_config", default_config()); });
}

pyorch_status pyorch_replay(pyorch_engine * engine, const pyorch_recording * recording,
    const pyorch_replay_config * config, pyorch_replay_result * result, int32_t max_distance, int32_t n_ranks,
    uint64_t * right, uint64_t * total, double * ends) {
    return guarded_outside_callbacks(__func__, [&] {
        if (!engine->simulated) {
            throw Failure(PYORCH_INVALID, "a replay needs a simulated engine");
        }
        const auto given    = pyorch::read_struct(recording, "pyorch_recording", pyorch_recording{});
        const auto settings = pyorch::read_struct(config, "pyorch_replay_config", default_config());
        pyorch::check_struct(result, "pyorch_replay_result");
        pyorch::check_recording(engine->table.map, given, settings);
        pyorch::checked_choice(PYORCH_CHOICES_POLICY, settings.device_policy, true);
        engine->prefetcher.change([&](pyorch::PrefetchPlanner & planner) {
            pyorch::write_struct(result, "pyorch_replay_result",
                pyorch::replay(engine->table, planner, engine->routers.all(), given, settings,
                    { max_distance, n_ranks, right, total }, ends));
        });
    });
}

} // extern "C"
