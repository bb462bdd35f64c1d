#include "engine.h"

#include "banks/host_bank.h"
#include "loading/readers.h"
#include "model/layout.h"
#include "replay/simulated.h"

#include <algorithm>

static std::unique_ptr<pyorch::Bank> make_bank(const pyorch::ModelMap & map, const pyorch_config & config) {
    const uint64_t budget = std::min(config.budget_bytes, map.slots_bytes());
    if (config.simulated) {
        return std::make_unique<pyorch::SimulatedBank>(map, budget);
    }
    return std::make_unique<pyorch::HostBank>(map, budget);
}

static bool repacks(const pyorch::ModelMap & map) {
    for (const auto & layer : map.layers) {
        if (std::any_of(layer.tensors.begin(), layer.tensors.end(), pyorch::can_repack)) {
            return true;
        }
    }
    return false;
}

static pyorch::Codecs codecs_of(const pyorch::ModelMap & map, const pyorch_config & config) {
    if (config.simulated) {
        return pyorch::simulated_codec;
    }
    return config.plain || !repacks(map) ? pyorch::plain_codec : pyorch::repacking_codec;
}

pyorch_engine::pyorch_engine(const pyorch::ModelMap & map, const pyorch_config & config) :
        simulated(config.simulated != 0),
        table(map, make_bank(map, config), pyorch::open_source(map, config), codecs_of(map, config), config),
        routers((int) map.layers.size()),
        prefetcher(table, routers),
        routing(table, prefetcher, routers, config.plain == 0),
        reader(simulated ? nullptr : pyorch::make_reader(table.loader(), pyorch::plan_reads(config))) {}
