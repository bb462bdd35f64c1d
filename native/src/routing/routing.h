// The work of one engine between the routers and the experts of its models: settings and counters of the stages, and
// their data.

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

// The target of tensor->extra of a managed expert tensor. Other backends store their own data there, so it begins with
// a number that no pointer has.
struct ManagedTensor {
    static constexpr uint64_t MAGIC = 0xFFFF70796F726368; // not a canonical address

    uint64_t  magic = MAGIC;
    Routing * routing;
    int       layer; // index into the layers with experts
    int       role;
    bool      repacked; // in the table; its order differs from the file's, see model/layout.h

    Multiplication multiplication;
};

// Returns the data of a tensor's extra; null for a tensor that llama.cpp manages.
const ManagedTensor * managed(const ggml_tensor * tensor);

// The receiver of each batch.
struct Observer {
    Mutex              mutex;
    pyorch_observer_fn function GUARDED_BY(mutex) = nullptr;
    void *             user GUARDED_BY(mutex)     = nullptr;
    std::atomic<bool>  active{ false }; // readers do not lock, because the observer itself may ask
};

struct Routing {
    // repack: repacks what can be repacked. own_kernels: kernels of kernels/ multiply if they can; false for a replay,
    // which multiplies nothing.
    Routing(
        Table & table, Prefetcher & prefetcher, Routers & routers, RemoteBank & remote, bool repack, bool own_kernels);
    ~Routing(); // remaining contexts are forgotten: ending them does nothing

    Routing(const Routing &)             = delete;
    Routing & operator=(const Routing &) = delete;

    Table &      table;
    Prefetcher & prefetcher;
    Routers &    routers;
    RemoteBank & remote;
    DeviceTier * device = nullptr; // null: no device

    // Decides which experts substitution treats as resident, and sees the computed layers; null: the real residency.
    // Set while nothing computes.
    std::shared_ptr<SimulatedCache> simulated_cache;

    Observer      observer;
    Activations   activations;
    Speculation   speculation;
    Substitutions substitutions;
    Calibration   calibration;
    ExpertRecipes recipes;

    std::vector<std::unique_ptr<ManagedTensor>> tensors; // by layer, PYORCH_MAX_ROLES each

    // Returns the tensor of that name in the map, or null.
    ManagedTensor * find(const char * name) const;

    // Returns the owner of a managed tensor, null if it is none any more: a model may be freed after its engine.
    static Routing * owner_of(const void * tensor);

    // A graph computes this layer. Other layers are never prefetched.
    void computes(int layer);

    // Throws Failure if an active setting applies routers, and a graph has a router that cannot be applied.
    void check_routers() const;

private:
    Mutex            mutex;
    std::vector<int> layers GUARDED_BY(mutex); // layers of some graph, ascending
};

// Inserts a number into ascending ones. Returns false if it was there.
bool insert(std::vector<int> & ascending, int number);

// Names the routing that manages the experts of the models that the calling thread loads from now on. Null: llama.cpp
// manages them. The patches call into it (routing/seam.cpp; the contract is docs/reference/seam.md).
// REQUIRES: `routing` outlives these models and their contexts.
void capture(Routing * routing);

} // namespace pyorch
