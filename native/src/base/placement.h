// Places threads on processors with two kinds of cores. Computing threads stay on the named ones, because the slowest
// delays all at every operation. Threads that read, recover and predict stay on the others.

#pragma once

#include <atomic>
#include <vector>

namespace pyorch {

// The processors on which to compute, among those that this thread may use; none: the operating system places threads.
// For the whole process. Throws Failure for other processors, and if the operating system cannot do it.
void set_compute_cpus(const std::vector<int> & cpus);

namespace placement {
extern std::atomic<unsigned> version; // number of changes
extern thread_local unsigned seen;    // the version by which this thread was placed
void                         place(bool computes);
} // namespace placement

// Places a thread that will compute, with the threads that it starts then; or one that will do other work.
inline void place_thread(bool computes) {
    if (placement::seen != placement::version.load(std::memory_order_relaxed)) {
        placement::place(computes);
    }
}

} // namespace pyorch
