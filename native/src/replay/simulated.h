// Memory and a disk that are only counted: the bank, the codec and the reader of a replay.

#pragma once

#include "banks/slot_bank.h"
#include "loading/reader.h"

#include <functional>
#include <random>

namespace pyorch {

// Slots without bytes. All of them lie at one address, which nobody reads from.
class SimulatedBank : public SlotBank {
public:
    using SlotBank::SlotBank;

private:
    char * extend(int) override { return &nowhere; }
    void   strip(int, char *) override {}

    static char nowhere;
};

// Nothing was read, so nothing is decoded.
const Codec & simulated_codec(Form form);

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

    void wait(std::unique_lock<std::mutex> & lock, std::condition_variable & changed) override;

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

} // namespace pyorch
