// Nanoseconds of a monotonic clock, and of this thread's processor time.

#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>

namespace pyorch {

inline uint64_t clock_ns() {
    using namespace std::chrono;
    return (uint64_t) duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

inline uint64_t thread_cpu_ns() {
    timespec t = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t) t.tv_sec * 1000000000u + (uint64_t) t.tv_nsec;
}

} // namespace pyorch
