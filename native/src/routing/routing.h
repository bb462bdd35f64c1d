// What one engine does between the routers and the experts of its models: the settings and counters of its stages,
// and what they work on.

#pragma once

#include "base/mutex.h"
#include "cluster/remote_bank.h"
#include "kernels/multiply.h"
#include "prediction/prefetcher.h"
#include "residency/simulated.h"
#include "residency/table.h"
#include "routing/calibration.h"
#include "routing/expert_graph.h"
#include "routing/speculation.h"
#include "routing/substitution.h"

#include <atomic>
#include <memory>
#include <vector>

namespace pyorch {

struct Routing;
class DeviceTier;

// What tensor->extra of a managed expert tensor points to. Other backends keep their own things there, so it begins
// with a number that no pointer has.
struct ManagedTensor {
    static constexpr uint64_t MAGIC = 0xFFFF70796F726368; // not a canonical address

    uint64_t  magic = MAGIC;
    Routing * routing;
    int       layer; // index into the layers with experts
    int       role;
    bool      repacked; // in the table: its order is not the file's, see model/layout.h

    Multiplication multiplication;
};

// What a tensor's extra says, null for one that llama.cpp manages.
const ManagedTensor * managed(const ggml_tensor * tensor);

// Who is shown each batch.
struct Observer {
    Mutex              mutex;
    pyorch_observer_fn function GUARDED_BY(mutex) = nullptr;
    void *             user GUARDED_BY(mutex)     = nullptr;
    std::atomic<bool>  active{ false }; // there is one; who asks does not lock, for it may be the observer itself
};

struct Routing {
    // repack: what can be repacked is. own_kernels: those of kernels/ multiply where they can; false for a
    // replay, which multiplies nothing.
    Routing(
        Table & table, Prefetcher & prefetcher, Routers & routers, RemoteBank & remote, bool repack, bool own_kernels);
    ~Routing(); // contexts that are left are not known any more: nothing is done when they end

    Routing(const Routing &)             = delete;
    Routing & operator=(const Routing &) = delete;

    Table &      table;
    Prefetcher & prefetcher;
    Routers &    routers;
    RemoteBank & remote;
    DeviceTier * device = nullptr; // null: none

    // Says what substitution takes for resident, and sees what layers compute; null: what is. Set while nothing
    // computes.
    std::shared_ptr<SimulatedCache> simulated_cache;

    Observer      observer;
    Activations   activations;
    Speculation   speculation;
    Substitutions substitutions;
    Calibration   calibration;
    ExpertRecipes recipes;

    std::vector<std::unique_ptr<ManagedTensor>> tensors; // by layer, PYORCH_MAX_ROLES each

    // The tensor of that name in the map, or null.
    ManagedTensor * find(const char * name) const;

    // Whose managed tensor lies there, null where it is none any more: a model may be freed after its engine.
    static Routing * owner_of(const void * tensor);

    // A graph computes this layer. Layers that none computes are never read ahead.
    void computes(int layer);

    // Throws where what is switched on applies routers, and a graph has one that cannot be applied.
    void check_routers() const;

private:
    Mutex            mutex;
    std::vector<int> layers GUARDED_BY(mutex); // that some graph computes, ascending
};

// Puts a number into ascending ones. False if it is there.
bool insert(std::vector<int> & ascending, int number);

// Names the routing that manages the experts of the models that the calling thread loads from now on. Null: llama.cpp
// manages them. The patches call into it (routing/seam.cpp; the contract is docs/reference/seam.md).
// REQUIRES: `routing` outlives these models and their contexts.
void capture(Routing * routing);

} // namespace pyorch
