#include "engine.h"

#include <algorithm>

// The queue depth of a fast disk needs more than one request under way; more than a few compete with the compute
// threads for cores.
static constexpr int DEFAULT_READERS = 2;

static std::unique_ptr<pyorch::Source> make_source(const pyorch::ModelMap & map, const pyorch_config & config) {
    return config.read ? pyorch::call_source(config.read, config.read_user) : pyorch::open_files(map, config.direct_io != 0);
}

pyorch_engine::pyorch_engine(const pyorch::ModelMap & map, const pyorch_config & config) :
        table(map, make_source(map, config), config),
        readers(table, config.n_readers > 0 ? config.n_readers : DEFAULT_READERS) {
    for (size_t i = 0; i < map.layers.size(); ++i) {
        for (size_t r = 0; r < map.layers[i].tensors.size(); ++r) {
            auto t = std::make_unique<pyorch::ManagedTensor>();
            t->engine = this;
            t->layer  = (int) i;
            t->role   = (int) r;
            tensors.push_back(std::move(t));
        }
    }
}

pyorch::ManagedTensor * pyorch_engine::find(const char * name) const {
    for (const auto & t : tensors) {
        if (table.map.layers[t->layer].tensors[t->role].name == name) {
            return t.get();
        }
    }
    return nullptr;
}

pyorch::GraphLayer * pyorch_engine::graph_layer(const void * context, int layer) {
    std::lock_guard<std::mutex> lock(graphs_mutex);
    auto & of_context = graphs[context];
    if (of_context.empty()) {
        owners.push_back(std::make_unique<pyorch::Owner>());
        for (size_t i = 0; i < table.map.layers.size(); ++i) {
            of_context.push_back({ this, owners.back().get(), context, (int) i });
        }
    }
    return &of_context[layer];
}
