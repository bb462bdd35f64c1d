#include "engine.h"

#include "banks/host_bank.h"
#include "replay/simulated.h"
#include "routing/seam.h"

#include <algorithm>

// Readers compete with the compute threads for cores, and each further one makes the matrix that is needed first
// arrive later. On two cores one was 20 % faster in decoding than two; a disk that wants a deeper queue is in a
// machine with more cores.
static int default_readers() {
    return std::clamp((int) std::thread::hardware_concurrency() / 2, 1, 4);
}

static std::unique_ptr<pyorch::Source> make_source(const pyorch::ModelMap & map, const pyorch_config & config) {
    return config.read ? pyorch::call_source(config.read, config.read_user) : pyorch::open_files(map, config.direct_io != 0);
}

static std::unique_ptr<pyorch::Bank> make_bank(const pyorch::ModelMap & map, const pyorch_config & config) {
    const uint64_t budget = std::min(config.budget_bytes, map.slots_bytes());
    if (config.simulated) {
        return std::make_unique<pyorch::SimulatedBank>(map, budget);
    }
    return std::make_unique<pyorch::HostBank>(map, budget);
}

static std::vector<int> n_experts(const pyorch::ModelMap & map) {
    std::vector<int> n;
    for (const auto & layer : map.layers) {
        n.push_back(layer.n_expert);
    }
    return n;
}

pyorch_engine::pyorch_engine(const pyorch::ModelMap & map, const pyorch_config & config) :
        table(map, make_bank(map, config), make_source(map, config), config.simulated ? pyorch::simulated_codec : pyorch::codec_of, config),
        substitutions((int) map.layers.size()),
        calibration(n_experts(map)),
        routers(map.layers.size()),
        own_routers(map.layers.size()),
        simulated(config.simulated != 0),
        prefetcher(table, [this] {
            std::lock_guard<std::mutex> lock(routers_mutex);
            return routers;
        }),
        readers(simulated ? nullptr : std::make_unique<pyorch::ReaderThreads>(table.loader(), config.n_readers > 0 ? config.n_readers : default_readers())) {
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

pyorch_engine::~pyorch_engine() {
    pyorch::forget(this);
}

pyorch::ManagedTensor * pyorch_engine::find(const char * name) const {
    for (const auto & t : tensors) {
        if (table.map.layers[t->layer].tensors[t->role].name == name) {
            return t.get();
        }
    }
    return nullptr;
}

pyorch::GraphLayer * pyorch_engine::graph_layer(const void * context, int layer, bool decode) {
    std::lock_guard<std::mutex> lock(graphs_mutex);
    auto & of_context = graphs[context];
    if (of_context.empty()) {
        owners.push_back(std::make_unique<pyorch::Owner>(pyorch::Owner { context }));
        for (size_t i = 0; i < table.map.layers.size(); ++i) {
            of_context.push_back({ this, owners.back().get(), context, (int) i, false });
            of_context.push_back({ this, owners.back().get(), context, (int) i, true });
        }
    }
    return &of_context[2 * layer + decode];
}

void pyorch_engine::set_router(int layer, const pyorch_router & it) {
    auto copy = [](const float * values, size_t n, std::vector<float> & to) -> const float * {
        to.assign(values, values ? values + n : values);
        return values ? to.data() : nullptr;
    };
    std::lock_guard<std::mutex> lock(routers_mutex);
    pyorch::OwnRouter & own = own_routers[layer];
    routers[layer] = {
        copy(it.gate, (size_t) it.n_expert * it.n_embd, own.gate), copy(it.bias, it.n_expert, own.bias),
        copy(it.norm, it.n_embd, own.norm), it.eps, copy(it.choice, it.n_expert, own.choice),
        it.sigmoid != 0, it.n_embd, it.n_expert,
    };
}
