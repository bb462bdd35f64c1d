// How fast a disk is, for the reads that a model needs: matrices of experts in random order, by the reader that an
// engine would have, and nothing computed.

#pragma once

#include "loading/readers.h"

namespace pyorch {

// Reads for so long, beside what it takes to begin and to end. Throws Failure: PYORCH_IO when a read fails.
pyorch_disk_speed probe_disk(
    const ModelMap & map, std::unique_ptr<Source> source, const ReadPlan & plan, double seconds);

} // namespace pyorch
