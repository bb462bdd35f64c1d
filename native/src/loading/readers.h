// Which reader a loader gets, and how much it asks of the disk at once.

#pragma once

#include "loading/reader.h"

#include <memory>

namespace pyorch {

struct ReadPlan {
    bool     io_uring; // else threads
    int      depth;    // requests under way at once: of the ring, or one for each thread
    uint64_t bytes;    // of a request at most
};

// What a configuration asks for, or suits most disks. Throws Failure where it asks for io_uring, and that is not to be
// had.
ReadPlan plan_reads(const pyorch_config & config);

// Where the plan's ring cannot be had after all, threads do it.
std::unique_ptr<Reader> make_reader(Loader & loader, const ReadPlan & plan);

} // namespace pyorch
