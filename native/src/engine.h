// One model's experts under one budget: the table, its readers, and who observes the routing.

#pragma once

#include "routing/calibration.h"
#include "prediction/prefetcher.h"
#include "loading/reader_threads.h"
#include "residency/table.h"
#include "routing/speculation.h"
#include "routing/substitution.h"

#include <map>
#include <memory>
#include <mutex>

struct ggml_backend_sched;

namespace pyorch {

// Where in which engine a layer of a graph belongs; user data of the graph's nodes.
struct GraphLayer {
    pyorch_engine * engine;
    Owner *         owner;
    const void *    context;
    int             layer; // index into the layers with experts
    bool            decode; // one token of each sequence

    // How the model makes weights of probabilities: see RoutedBatch.
    bool normalized       = false;
    bool softmax_selected = false;

    // What substitution made of the weights of the running ubatch; empty: nothing.
    std::vector<float> new_weights = {};
};

// What tensor->extra of a managed expert tensor points to. Other backends keep their own things
// there, so it begins with a number that no pointer has.
struct ManagedTensor {
    static constexpr uint64_t MAGIC = 0xFFFF70796F726368; // not a canonical address

    uint64_t        magic = MAGIC;
    pyorch_engine * engine;
    int             layer;
    int             role;
};

// Router weights that no model holds.
struct OwnRouter {
    std::vector<float> gate, bias, norm, choice;
};

} // namespace pyorch

struct pyorch_engine {
    pyorch_engine(const pyorch::ModelMap & map, const pyorch_config & config);
    ~pyorch_engine();

    pyorch::Table                                            table;
    pyorch::Substitutions                                    substitutions;
    pyorch::Speculation                                      speculation;
    std::vector<std::unique_ptr<pyorch::ManagedTensor>>      tensors;
    std::mutex                                               graphs_mutex;
    std::map<const void *, std::vector<pyorch::GraphLayer>>  graphs; // by context, two entries a layer: prefill, decode
    std::vector<std::unique_ptr<pyorch::Owner>>              owners;

    std::mutex        observer_mutex;
    pyorch_observer_fn observer      = nullptr;
    void *             observer_user = nullptr;

    pyorch::Calibration                calibration;
    std::mutex                         routers_mutex;
    std::vector<pyorch::RouterWeights> routers; // by layer, as the graph last had them, or from own_routers
    std::vector<pyorch::OwnRouter>     own_routers;

    const bool         simulated;
    pyorch::Prefetcher prefetcher;
    std::unique_ptr<pyorch::Reader> readers; // last: stops before the table goes; none in a simulated engine

    // The tensor of that name in the map, or null.
    pyorch::ManagedTensor * find(const char * name) const;

    // Copies the weights. For a simulated engine.
    void set_router(int layer, const pyorch_router & router);

    pyorch::GraphLayer * graph_layer(const void * context, int layer, bool decode);
};
