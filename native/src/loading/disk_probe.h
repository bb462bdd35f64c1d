// How fast a disk is, for the reads that a model needs: matrices of experts in random order, by the reader that an
// engine would have, and nothing computed.

#pragma once

#include "loading/readers.h"

namespace pyorch {

struct DiskSpeed {
    double bytes_per_second;
    double cores;  // that the process kept busy meanwhile
    bool   direct; // around the page cache
};

// Reads for so long, beside what it takes to begin and to end. Throws Failure: PYORCH_IO when a read fails.
DiskSpeed probe_disk(const ModelMap & map, std::unique_ptr<Source> source, const ReadPlan & plan, double seconds);

} // namespace pyorch
