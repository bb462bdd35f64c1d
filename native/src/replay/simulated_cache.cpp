#include "replay/simulated_cache.h"

#include "base/status.h"
#include "replay/policies/replay_policies.h"

#include <algorithm>
#include <cmath>

namespace pyorch {
namespace {

constexpr uint64_t READ_BYTES = 1u << 20;

SimulatedDisk disk_of(const ModelMap & map, double read_layers, uint64_t seed) {
    if (!(read_layers >= 0) || !std::isfinite(read_layers)) {
        throw Failure(
            PYORCH_INVALID, format("reading an expert cannot take %g times as long as a layer computes", read_layers));
    }
    double bytes = 0;
    for (const MoeLayer & layer : map.layers) {
        bytes += (double) layer.slot_bytes() / (double) map.layers.size();
    }
    return { 0, read_layers > 0 ? bytes / read_layers : INFINITY, 0, 0, seed };
}

std::unique_ptr<Bank> bank_of(const ModelMap & map, const pyorch_config & config) {
    return std::make_unique<SimulatedBank>(map, std::min(config.budget_bytes, map.slots_bytes()));
}

// Requests of a size that neither the file system nor the kernel of this machine has a say in.
pyorch_config simulated(pyorch_config config) {
    config.direct_io  = 0;
    config.reader     = PYORCH_READER_THREADS;
    config.read_bytes = READ_BYTES;
    return config;
}

} // namespace

SimulatedCache::SimulatedCache(const ModelMap & map, const pyorch_config & config, double read_layers, uint64_t seed) :
        table(map, bank_of(map, config), open_source(map, simulated(config)), simulated_codec, simulated(config),
            replay_policies()),
        disk(disk_of(map, read_layers, seed)),
        reader(table.loader(), disk, { 1, INFINITY }, [this](double ended) { now = std::max(now, ended); }) {}

SimulatedCache::~SimulatedCache() {
    table.forget(owner);
    while (reader.at_work()) {
        reader.end_next();
    }
}

void SimulatedCache::fill(int il, const int32_t * experts, int n) {
    std::lock_guard<std::mutex> lock(mutex);
    table.prefetch(il, experts, n);
    do {
        reader.run_until(now);
        now = reader.at_work() ? std::max(now, reader.ends_at()) : now;
    } while (reader.at_work());
}

void SimulatedCache::look(int layer, std::vector<uint8_t> & resident, std::vector<uint8_t> & loading) {
    std::lock_guard<std::mutex> lock(mutex);
    reader.run_until(now);
    table.resident(layer, resident, &loading);
}

void SimulatedCache::pass(const void * context, int layer, const Demand & demand, const std::vector<int> & deferred) {
    std::lock_guard<std::mutex> lock(mutex);
    owner.context = context;
    table.acquire(owner, layer, demand);
    if (!deferred.empty()) {
        table.defer(layer, deferred);
    }
    // Matrix by matrix, as kernels go through them.
    const int    n_roles = (int) table.map.layers[layer].tensors.size();
    const double each    = (double) demand.n_tokens / (n_roles * std::max<double>(1, (double) demand.experts.size()));
    reader.run_until(now);
    for (int role = 0; role < n_roles; ++role) {
        for (int expert : demand.experts) {
            wait_for(layer, expert, role);
            now += each;
            reader.run_until(now);
        }
    }
    if (demand.experts.empty()) {
        now += demand.n_tokens;
        reader.run_until(now);
    }
    table.release(owner);
    reader.run_until(now);
}

void SimulatedCache::wait_for(int layer, int expert, int role) {
    while (!table.address(owner, layer, expert, role, false) && reader.at_work()) {
        now = std::max(now, reader.ends_at());
        reader.run_until(now);
    }
}

} // namespace pyorch
