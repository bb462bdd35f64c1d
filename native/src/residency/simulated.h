// Memory and a disk that are only counted: the bank, the codec and the reader of a replay; and a cache of them, which
// says what would be resident where that must not depend on how fast this machine reads and computes.

#pragma once

#include "banks/bank.h"
#include "base/mutex.h"
#include "loading/readers.h"
#include "residency/table.h"

#include <functional>
#include <memory>
#include <random>

namespace pyorch {

// Slots without bytes. All of them lie at one address, which nobody reads from.
class SimulatedBank : public Bank {
public:
    using Bank::Bank;

private:
    char * extend(int) override { return &nowhere; }
    void   strip(int, char *) override {}

    static char nowhere;
};

struct SimulatedDisk {
    double   read_seconds; // that a request costs beside its bytes
    double   bytes_per_second;
    double   pause_seconds; // at the end of each period it stands still for so long
    double   period_seconds;
    uint64_t seed = 0; // 0: reads take no other time; else from half to one and a half of it, as drawn

    // When it ends what it needs so many seconds for.
    double end_of(double begin, double seconds) const;
};

// Threads that decode matrices of compressed experts.
struct SimulatedDecoders {
    int    n;
    double bytes_per_second; // of each, as kernels compute with them; infinite: decoding takes no time
};

// The one reader with its disk, and the threads that decode beside it, in simulated time.
class SimulatedReader : public Reader {
public:
    // waited(time): called when someone waits for memory that a load holds, with the time at which it may be free.
    SimulatedReader(Loader & loader, const SimulatedDisk & disk, const SimulatedDecoders & decoders,
        std::function<void(double)> waited);

    // Lets it do what it does up to a time. What it could take then, it takes.
    void run_until(double now);

    // Ends what ends first of what is read and decoded; returns that time. REQUIRES: at_work()
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
    std::vector<Decoding>       decoding; // the first to end comes first
    ReadRequest                 request = {};
    bool                        busy    = false;
    double                      began   = 0;
    double                      ends    = 0;
    std::mt19937_64             random;

    double chance();
    void   take(double at);
    void   decode(const ReadRequest & request, double at);
};

// The residency table as it would be on a machine whose disk and processor take the time that they are told: the table,
// its policy and its reader in simulated time, beside an engine that computes.
//
// A layer of a token computes for 1, however long it takes here; to who asks in seconds, that is a millisecond. One
// reader takes what the table orders, in the table's order; a layer waits for what it demands. Nothing is guessed.
class SimulatedCache {
public:
    // Empty, with the budget and the policy of an engine of this configuration. read_layers: so many times as long as a
    // layer of a token computes, an expert of mean size is read. seed: see SimulatedDisk. Throws Failure, as a table
    // does.
    SimulatedCache(const ModelMap & map, const pyorch_config & config, double read_layers, uint64_t seed);
    ~SimulatedCache();

    // What is ordered by name comes, before any other layer does.
    void fill(int il, const int32_t * experts, int n);

    // A layer comes. resident, loading: [n_expert] each, nonzero for the experts that are there, and on their way, by
    // now.
    void look(int layer, std::vector<uint8_t> & resident, std::vector<uint8_t> & loading);

    // It asks for what it needs, waits for that, and computes. deferred: as of Table::defer.
    void pass(const void * context, int layer, const Demand & demand, const std::vector<int> & deferred);

    // A context is gone: another one may get its address.
    void forget(const void * context);

    Tier & tier() { return table; }

private:
    Mutex           mutex; // contexts may compute beside each other
    Table           table;
    SimulatedDisk   disk;
    SimulatedReader reader GUARDED_BY(mutex);
    Owner           owner GUARDED_BY(mutex);
    double          now GUARDED_BY(mutex) = 0;

    void wait_for(int layer, int expert, int role) REQUIRES(mutex);
};

} // namespace pyorch
