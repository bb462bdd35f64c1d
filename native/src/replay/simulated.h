// Memory and a disk that are only counted: the bank, the codec and the reader of a replay.

#pragma once

#include "banks/slot_bank.h"
#include "loading/reader.h"

#include <functional>

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
    double read_seconds;     // that a request costs beside its bytes
    double bytes_per_second;
    double pause_seconds;    // at the end of each period it stands still for so long
    double period_seconds;

    // When it ends what it needs so many seconds for.
    double end_of(double begin, double seconds) const;
};

// The one reader and its disk, in simulated time.
class SimulatedReader : public Reader {
public:
    // waited(time): called when someone waits for memory that a read holds, with the time at which that read ends.
    SimulatedReader(Loader & loader, const SimulatedDisk & disk, std::function<void(double)> waited);

    // Lets it do what it does up to a time. What it could take then, it takes.
    void run_until(double now);

    // The time at which it ends what it reads. REQUIRES: reading()
    double end_read();

    bool   reading() const { return busy; }
    double ends_at() const { return ends; }
    double busy_seconds = 0;

    void wait(std::unique_lock<std::mutex> & lock, std::condition_variable & changed) override;

private:
    const SimulatedDisk         disk;
    std::function<void(double)> waited;
    ReadRequest                 request = {};
    bool                        busy    = false;
    double                      began   = 0;
    double                      ends    = 0;

    void take(double at);
};

} // namespace pyorch
