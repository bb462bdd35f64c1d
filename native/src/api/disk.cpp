#include "api/api.h"
#include "api/choices.h"
#include "api/handles.h"
#include "api/structs.h"
#include "loading/disk_probe.h"

using namespace pyorch;

extern "C" {

pyorch_status pyorch_measure_disk(
    const pyorch_model_map * map, const pyorch_config * config, double seconds, pyorch_disk_speed * speed) {
    return guarded_outside_callbacks(__func__, [&] {
        const pyorch_config given = read_struct(config, "pyorch_config", default_config());
        check_struct(speed, "pyorch_disk_speed");
        if (map->map.layers.empty()) {
            throw Failure(PYORCH_INVALID, format("%s has no routed experts", map->map.files[0].path.c_str()));
        }
        if (!(seconds > 0) || seconds > 3600) {
            throw Failure(
                PYORCH_INVALID, format("a disk is measured for more than 0 seconds, at most 3600, not %g", seconds));
        }
        const ReadPlan  plan = plan_reads(given);
        const DiskSpeed fast = probe_disk(map->map, open_source(map->map, given), plan, seconds);
        write_struct(speed, "pyorch_disk_speed",
            pyorch_disk_speed{ sizeof(pyorch_disk_speed), fast.bytes_per_second, fast.cores, plan.bytes, plan.depth,
                plan.io_uring ? PYORCH_READER_IO_URING : PYORCH_READER_THREADS, fast.direct, 0 });
    });
}

} // extern "C"
