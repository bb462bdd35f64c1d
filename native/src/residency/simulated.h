// Simulated memory and disk: the bank, codec and reader of a replay. And a simulated cache: the experts that would be
// resident if this machine always took the same time to read and compute.

#pragma once

#include "banks/bank.h"
#include "base/mutex.h"
#include "loading/readers.h"
#include "residency/table.h"

#include <functional>
#include <memory>
#include <random>

namespace pyorch {

// Slots without bytes. All have one address, which is never read.
class SimulatedBank : public Bank {
public:
    using Bank::Bank;

private:
    char * extend(int) override { return &nowhere; }
    void   strip(int, char *) override {}

    static char nowhere;
};

struct SimulatedDisk {
    double   read_seconds; // of a request, besides its bytes
    double   bytes_per_second;
    double   pause_seconds; // the disk stands still for so long at the end of each period
    double   period_seconds;
    uint64_t seed = 0; // 0: each read takes its mean time; otherwise 0.5 to 1.5 of it, at random

    // The time at which work of so many seconds ends.
    double end_of(double begin, double seconds) const;
};

// Threads that decode matrices of compressed experts.
struct SimulatedDecoders {
    int    n;
    double bytes_per_second; // of each thread, full bytes; infinite: decoding takes no time
};

// One reader with its disk, and the threads that decode, in simulated time.
class SimulatedReader : public Reader {
public:
    // waited(time): called if a layer waits for the memory of a load, with the time at which that may be free.
    SimulatedReader(Loader & loader, const SimulatedDisk & disk, const SimulatedDecoders & decoders,
        std::function<void(double)> waited);

    // Works until a time, and takes the orders of the table meanwhile.
    void run_until(double now);

    // Ends the read or decoding that ends next; returns that time. REQUIRES: at_work()
    double end_next();

    bool   at_work() const { return busy || !decoding.empty(); }
    double ends_at() const;
    double busy_seconds   = 0; // of the disk
    double decode_seconds = 0; // the sum over threads

    void wait(Mutex & mutex, CondVar & changed) override REQUIRES(mutex);

private:
    struct Decoding {
        ReadRequest request;
        double      ends;
    };

    const SimulatedDisk         disk;
    const SimulatedDecoders     decoders;
    std::function<void(double)> waited;
    std::vector<double>         free_at;  // each decoder
    std::vector<Decoding>       decoding; // the first to end is first
    ReadRequest                 request = {};
    bool                        busy    = false;
    double                      began   = 0;
    double                      ends    = 0;
    std::mt19937_64             random;

    double chance();
    void   take(double at);
    void   decode(const ReadRequest & request, double at);
};

// The residency table of a machine whose disk and processor take given times: the table, its policy and its reader in
// simulated time, beside a computing engine.
//
// A layer of a token computes for 1, however long it takes here; for callers that ask in seconds, that is a
// millisecond. One reader follows the table's orders; a layer waits for its demand. No guess is made.
class SimulatedCache {
public:
    // Empty, with the budget and the policy of an engine of this configuration. read_layers: the time to read an expert
    // of mean size, in the time that a layer of a token computes. seed: see SimulatedDisk. Throws Failure like a table.
    SimulatedCache(const ModelMap & map, const pyorch_config & config, double read_layers, uint64_t seed);
    ~SimulatedCache();

    // Reads the experts that were ordered by name, before any layer comes.
    void fill(int il, const int32_t * experts, int n);

    // A layer comes. resident, loading: [n_expert] each, nonzero for the experts that are resident, or being read, now.
    void look(int layer, std::vector<uint8_t> & resident, std::vector<uint8_t> & loading);

    // The layer asks for its demand, waits for it, and computes. deferred: as in Table::defer.
    void pass(const void * context, int layer, const Demand & demand, const std::vector<int> & deferred);

    // A context is gone; another one may get its address.
    void forget(const void * context);

    Tier & tier() { return table; }

private:
    Mutex           mutex; // contexts may compute at the same time
    Table           table;
    SimulatedDisk   disk;
    SimulatedReader reader GUARDED_BY(mutex);
    Owner           owner GUARDED_BY(mutex);
    double          now GUARDED_BY(mutex) = 0;

    void wait_for(int layer, int expert, int role) REQUIRES(mutex);
};

} // namespace pyorch
