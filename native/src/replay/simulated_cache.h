// The residency table as it would be on a machine whose disk and processor take the time that they are told: the table,
// its policy and its reader in simulated time, beside an engine that computes.
//
// A layer of a token computes for 1, however long it takes here; to who asks in seconds, that is a millisecond. One
// reader takes what the table orders, in the table's order; a layer waits for what it demands. Nothing is guessed.

#pragma once

#include "replay/simulated.h"
#include "residency/table.h"
#include "residency/virtual_cache.h"

#include <memory>
#include <mutex>

namespace pyorch {

class SimulatedCache : public VirtualCache {
public:
    // Empty, with the budget and the policy of an engine of this configuration. read_layers: so many times as long as a
    // layer of a token computes, an expert of mean size is read. seed: see SimulatedDisk. Throws Failure, as a table
    // does.
    SimulatedCache(const ModelMap & map, const pyorch_config & config, double read_layers, uint64_t seed);
    ~SimulatedCache() override;

    // What is ordered by name comes, before any other layer does.
    void fill(int il, const int32_t * experts, int n);

    void   look(int layer, std::vector<uint8_t> & resident, std::vector<uint8_t> & loading) override;
    void   pass(const void * context, int layer, const Demand & demand, const std::vector<int> & deferred) override;
    double bytes_per_second() const override { return 1000 * disk.bytes_per_second; }

    void get_stats(int il, pyorch_stats & stats) { table.get_stats(il, stats); }
    void reset_stats() { table.reset_stats(); }

private:
    std::mutex      mutex; // contexts may compute beside each other
    Table           table;
    SimulatedDisk   disk;
    SimulatedReader reader;
    Owner           owner;
    double          now = 0;

    void wait_for(int layer, int expert, int role);
};

} // namespace pyorch
