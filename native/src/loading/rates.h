// Recent speed of reads, their processor time, and the share of the time in which a layer waited for one.

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

    // Adds a read: see Loader::read().
    void add(uint64_t bytes, uint64_t ns, uint64_t cpu_ns) {
        recent_bytes += (double) bytes - FADING * recent_bytes;
        recent_ns += (double) ns - FADING * recent_ns;
        recent_cpu += (double) cpu_ns - FADING * recent_cpu;
    }

    // Adds processor time of decoding.
    void add_cpu(uint64_t ns) { recent_cpu += (double) ns; }

    // 0 before the first read.
    double bytes_per_second() const { return recent_ns > 0 ? recent_bytes / recent_ns * 1e9 : 0; }

    // Processor time per time of reads, at most 1.
    double cpu_share() const { return recent_ns > 0 ? std::min(1.0, recent_cpu / recent_ns) : 0; }

    // The share of the time in which a reader read for a waiting layer.
    double busy_share() const {
        const uint64_t now  = clock_ns();
        const double   busy = recent_busy + (n_waited_for > 0 ? (double) (now - began) : 0);
        const double   time = recent_time + (ended ? (double) (now - ended) : 0);
        return time > 0 ? std::min(1.0, busy / time) : 0;
    }

private:
    static constexpr double FADING = 0.02; // of the sums, with each read

    double   recent_bytes = 0; // fading sums
    double   recent_ns    = 0;
    double   recent_cpu   = 0; // ns
    int      n_waited_for = 0; // requests
    uint64_t began        = 0; // when the first such request began
    uint64_t ended        = 0; // when the last such request ended
    double   recent_busy  = 0; // ns between the two, a fading sum
    double   recent_time  = 0; // ns of all time
};

} // namespace pyorch
