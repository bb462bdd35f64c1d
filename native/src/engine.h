// One model's experts under one budget: the parts of the runtime, put together.
//
// This is the composition root. It knows all parts, and none of them knows it; only api/ does.

#pragma once

#include "loading/reader.h"
#include "prediction/prefetcher.h"
#include "residency/table.h"
#include "routing/routing.h"

#include <memory>
#include <unistd.h>

struct pyorch_engine {
    pyorch_engine(const pyorch::ModelMap & map, const pyorch_config & config);

    const pid_t            pid = getpid(); // a process that is forked from this one has none of the threads
    const bool             simulated;
    pyorch::Table          table;
    pyorch::Routers        routers;
    pyorch::Prefetcher     prefetcher;
    pyorch::Routing        routing;
    std::unique_ptr<pyorch::Reader> reader; // last: stops before the table goes; none in a simulated engine
};
