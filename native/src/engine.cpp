#include "engine.h"

#include "banks/host_bank.h"
#include "loading/readers.h"
#include "replay/simulated.h"

#include <algorithm>

static std::unique_ptr<pyorch::Bank> make_bank(const pyorch::ModelMap & map, const pyorch_config & config) {
    const uint64_t budget = std::min(config.budget_bytes, map.slots_bytes());
    if (config.simulated) {
        return std::make_unique<pyorch::SimulatedBank>(map, budget);
    }
    return std::make_unique<pyorch::HostBank>(map, budget);
}

static pyorch::Codecs codecs_of(const pyorch_config & config) {
    return config.simulated ? pyorch::simulated_codec : config.plain ? pyorch::plain_codec : pyorch::repacking_codec;
}

pyorch_engine::pyorch_engine(const pyorch::ModelMap & map, const pyorch_config & config) :
        simulated(config.simulated != 0),
        table(map, make_bank(map, config), pyorch::open_source(map, config), codecs_of(config), config),
        routers((int) map.layers.size()),
        prefetcher(table, routers),
        routing(table, prefetcher, routers, config.plain == 0),
        reader(simulated ? nullptr : pyorch::make_reader(table.loader(), pyorch::plan_reads(config))) {}
