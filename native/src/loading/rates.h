// How fast reads were lately, what they took of processors, and for which share of the time a layer waited for one.

#pragma once

#include "base/cpu_time.h"

#include <algorithm>
#include <cstdint>

namespace pyorch {

class ReadRates {
public:
    // A reader takes a request that a layer waits for, and ends it.
    void begin_wait() {
        if (n_waited_for++ == 0) {
            began = clock_ns();
            ended = ended ? ended : began;
        }
    }
    void end_wait() {
        if (--n_waited_for == 0) {
            const uint64_t now = clock_ns();
            recent_busy += (double) (now - began) - FADING * recent_busy;
            recent_time += (double) (now - ended) - FADING * recent_time;
            ended = now;
        }
    }

    // Of a read: see Loader::read().
    void add(uint64_t bytes, uint64_t ns, uint64_t cpu_ns) {
        recent_bytes += (double) bytes - FADING * recent_bytes;
        recent_ns += (double) ns - FADING * recent_ns;
        recent_cpu += (double) cpu_ns - FADING * recent_cpu;
    }

    // What decoding took of a processor.
    void add_cpu(uint64_t ns) { recent_cpu += (double) ns; }

    // 0 before the first read.
    double bytes_per_second() const { return recent_ns > 0 ? recent_bytes / recent_ns * 1e9 : 0; }

    // Of the time of reads, the share in which a processor is busy with them.
    double cpu_share() const { return recent_ns > 0 ? std::min(1.0, recent_cpu / recent_ns) : 0; }

    // Of the time, the share in which a reader read what a layer waited for.
    double busy_share() const {
        const uint64_t now  = clock_ns();
        const double   busy = recent_busy + (n_waited_for > 0 ? (double) (now - began) : 0);
        const double   time = recent_time + (ended ? (double) (now - ended) : 0);
        return time > 0 ? std::min(1.0, busy / time) : 0;
    }

private:
    static constexpr double FADING = 0.02; // of what is known of reads, with each one

    double   recent_bytes = 0; // fading sums
    double   recent_ns    = 0;
    double   recent_cpu   = 0; // ns
    int      n_waited_for = 0; // requests
    uint64_t began        = 0; // when there was first one of them
    uint64_t ended        = 0; // and when there was none any more
    double   recent_busy  = 0; // ns of the time between the two, a fading sum
    double   recent_time  = 0; // ns of all of it
};

} // namespace pyorch
