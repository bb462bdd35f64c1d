// Processors with two kinds of cores: threads that compute stay on those that were named, for they meet at every
// operation and go at the pace of the slowest; threads that read, recover and predict stay on the others.

#pragma once

#include <atomic>
#include <vector>

namespace pyorch {

// The numbers of processors on which to compute, of those that this thread might use at first; none: where the system
// places threads. Of the whole process. Throws Failure for others, and where the system cannot do it.
void set_compute_cpus(const std::vector<int> & cpus);

namespace placement {
extern std::atomic<unsigned> version; // counts changes
extern thread_local unsigned seen;    // by which this thread was placed
void                         place(bool computes);
} // namespace placement

// Of a thread that is about to compute, and of those that it starts then; or of one that is about to do other work.
inline void place_thread(bool computes) {
    if (placement::seen != placement::version.load(std::memory_order_relaxed)) {
        placement::place(computes);
    }
}

} // namespace pyorch
