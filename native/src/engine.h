// One model's experts under one budget: it composes the parts of the runtime.
//
// This is the composition root. It uses all parts, and no part uses it; only api/ does.

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
    // simulated: for replays; then nothing is read, and no model can be loaded under it.
    pyorch_engine(const pyorch::ModelMap & map, const pyorch_config & config, bool simulated);
    ~pyorch_engine();

    const pid_t                        pid = getpid(); // a forked process has no threads of the engine
    const bool                         simulated;
    pyorch_config                      config; // `source` is invalid after the constructor
    std::shared_ptr<pyorch::PageLocks> locks;  // of host memory, for the device; null: none
    pyorch::Table                      table;
    pyorch::Routers                    routers;
    pyorch::Prefetcher                 prefetcher;
    pyorch::RemoteBank                 remote;
    pyorch::Routing                    routing;
    std::unique_ptr<pyorch::Reader>    reader; // stops before the table is destroyed; none in a simulated engine
    pyorch::ReplayWatch                watch;  // of replays on a simulated engine

    // Destroyed before the reader, for which it may wait. Null: no device.
    std::unique_ptr<pyorch::DeviceTier> device;

    // All memories of experts, the table first.
    std::vector<pyorch::Tier *> tiers;

    // Last, because it needs all others.
    struct Server {
        Server(pyorch::Routing & routing, int n_threads, const pyorch::ListenerConfig & config) :
                worker(routing, n_threads),
                listener(config, [this](const auto & rows, float * outputs) { worker.compute(rows, outputs); }) {}

        pyorch::ExpertWorker worker;
        pyorch::Listener     listener;
    };
    pyorch::Mutex           serving;
    std::unique_ptr<Server> server GUARDED_BY(serving);

    // Returns a checksum of the facts that two servers must have in common to compute for each other, and kernels() of
    // those for equal bits.
    uint64_t shape() const;
    uint64_t kernels() const;
};
