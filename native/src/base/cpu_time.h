// The processor's time that this thread has used.

#pragma once

#include <cstdint>
#include <ctime>

namespace pyorch {

inline uint64_t thread_cpu_ns() {
    timespec t = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t) t.tv_sec * 1000000000u + (uint64_t) t.tv_nsec;
}

} // namespace pyorch
