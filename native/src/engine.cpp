#include "engine.h"

#include "banks/host_bank.h"
#include "replay/simulated.h"

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

static pyorch::Codecs codecs_of(const pyorch_config & config) {
    return config.simulated ? pyorch::simulated_codec : config.plain ? pyorch::plain_codec : pyorch::repacking_codec;
}

pyorch_engine::pyorch_engine(const pyorch::ModelMap & map, const pyorch_config & config) :
        simulated(config.simulated != 0),
        table(map, make_bank(map, config), make_source(map, config), codecs_of(config), config),
        routers((int) map.layers.size()),
        prefetcher(table, routers),
        routing(table, prefetcher, routers, config.plain == 0),
        readers(simulated ? nullptr : std::make_unique<pyorch::ReaderThreads>(table.loader(), config.n_readers > 0 ? config.n_readers : default_readers())) {}
