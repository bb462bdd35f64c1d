// One model's experts under one budget: the parts of the runtime, put together.
//
// This is the composition root. It knows all parts, and none of them knows it; only api/ does.

#pragma once

#include "cluster/listener.h"
#include "loading/readers.h"
#include "prediction/prefetcher.h"
#include "replay/replay.h"
#include "residency/table.h"
#include "routing/device_tier.h"
#include "routing/expert_worker.h"
#include "routing/routing.h"

#include <memory>
#include <unistd.h>

struct pyorch_engine {
    // simulated: for replays; nothing is read, and no model can be loaded under it.
    pyorch_engine(const pyorch::ModelMap & map, const pyorch_config & config, bool simulated);
    ~pyorch_engine();

    const pid_t                        pid = getpid(); // a process that is forked from this one has none of the threads
    const bool                         simulated;
    pyorch_config                      config; // its source is gone when the engine is made
    std::shared_ptr<pyorch::PageLocks> locks;  // of host memory, for the device; null: none
    pyorch::Table                      table;
    pyorch::Routers                    routers;
    pyorch::Prefetcher                 prefetcher;
    pyorch::RemoteBank                 remote;
    pyorch::Routing                    routing;
    std::unique_ptr<pyorch::Reader>    reader; // stops before the table goes; none in a simulated engine
    pyorch::ReplayWatch                watch;  // of replays on a simulated engine

    // Goes before the reader, for which it may wait. Null: no device.
    std::unique_ptr<pyorch::DeviceTier> device;

    // All memories of experts, the table first.
    std::vector<pyorch::Tier *> tiers;

    // Last, because it needs all of them.
    struct Server {
        Server(pyorch::Routing & routing, int n_threads, const pyorch::ListenerConfig & config) :
                worker(routing, n_threads),
                listener(config, [this](const auto & rows, float * outputs) { worker.compute(rows, outputs); }) {}

        pyorch::ExpertWorker worker;
        pyorch::Listener     listener;
    };
    pyorch::Mutex           serving;
    std::unique_ptr<Server> server GUARDED_BY(serving);

    // What two servers must have in common to compute for each other, and what for the same bits.
    uint64_t shape() const;
    uint64_t kernels() const;
};
