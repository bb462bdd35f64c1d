// Measures the speed of a disk for the reads of a model: matrices of experts in random order, by the engine's reader,
// without computing.

#pragma once

#include "loading/readers.h"

namespace pyorch {

// Reads for so many seconds, besides the begin and the end. Throws Failure: PYORCH_IO if a read fails.
pyorch_disk_speed probe_disk(
    const ModelMap & map, std::unique_ptr<Source> source, const ReadPlan & plan, double seconds);

} // namespace pyorch
