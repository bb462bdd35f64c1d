// Disks with copies of the same files: chooses the disk that will end a request first.
//
// The expected end is the time to read the request and all that is under way on the disk, at the disk's recent speed.
// So of two disks the faster one gets more requests, and both end at the same time. Thread-safe.

#pragma once

#include "base/cpu_time.h"
#include "base/mutex.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pyorch {

class Disks {
public:
    explicit Disks(int n) : n(n), disks(n) {}

    int count() const { return n; }

    // The disk for a request of so many bytes, among the disks for which usable(disk) holds.
    // REQUIRES: one of them is usable.
    template <typename Usable>
    int begin(uint64_t size, Usable usable) {
        MutexLock      lock(mutex);
        const uint64_t now     = clock_ns();
        double         fastest = 0;
        for (Disk & disk : disks) {
            // A disk that was slow once is tried again from time to time.
            if (disk.under_way == 0 && now - disk.last_ns > FORGET_NS) {
                disk.bytes = disk.ns = 0;
            }
            fastest = std::max(fastest, disk.speed());
        }
        int    best     = -1;
        double best_end = 0;
        for (int i = 0; i < count(); ++i) {
            // A disk of unknown speed gets one request at a time until it has ended one: others would wait for it.
            if (disks[i].ns == 0 && disks[i].under_way > 0 && fastest > 0) {
                continue;
            }
            const double speed = disks[i].ns > 0 ? disks[i].speed() : fastest; // an unknown disk counts as the fastest
            const double end   = (double) (disks[i].under_way + size) / (speed > 0 ? speed : 1);
            // Of equal ones, a disk that was not measured yet.
            if (usable(i) && (best < 0 || end < best_end || (end == best_end && disks[i].ns == 0))) {
                best     = i;
                best_end = end;
            }
        }
        for (int i = 0; best < 0; ++i) {
            best = usable(i) ? i : best;
        }
        Disk & chosen = disks[best];
        if (chosen.under_way == 0) {
            chosen.last_ns = now;
        }
        chosen.under_way += size;
        return best;
    }

    void end(int disk, uint64_t size, int64_t result) {
        MutexLock      lock(mutex);
        Disk &         ended = disks[disk];
        const uint64_t now   = clock_ns();
        if (result > 0) {
            ended.bytes += (double) result - FADE * ended.bytes;
            ended.ns += (double) (now - ended.last_ns) - FADE * ended.ns;
        }
        ended.last_ns = now;
        ended.under_way -= size;
    }

private:
    static constexpr double   FADE      = 0.02;
    static constexpr uint64_t FORGET_NS = 5'000'000'000;

    struct Disk {
        uint64_t under_way = 0; // bytes
        uint64_t last_ns   = 0; // when a request ended there, or began on the idle disk
        double   bytes     = 0; // fading sums over the time with requests under way
        double   ns        = 0;

        double speed() const { return ns > 0 ? bytes / ns : 0; }
    };

    const int         n;
    Mutex             mutex;
    std::vector<Disk> disks GUARDED_BY(mutex);
};

} // namespace pyorch
