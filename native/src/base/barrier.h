// A barrier whose threads wait awake while processors are free, and asleep if others need the processors.
//
// To wake a thread costs a tenth of a millisecond in a virtual machine, and a token has hundreds of barriers. On a busy
// machine, a thread that waits awake takes the processor of the thread that it waits for. So threads measure how long
// they were recently ready without a processor (run_delay of the kernel's schedstat): no fixed number of rounds suits
// both machines.

#pragma once

#include <atomic>
#include <cstdint>

namespace pyorch {

// Whether others need the processors of the computing threads. All times are nanoseconds of clock_ns().
class Contention {
public:
    // A thread was ready without a processor for `delayed` of the last `elapsed` until now.
    void note(uint64_t now, uint64_t elapsed, uint64_t delayed) {
        if (delayed * SHARE > elapsed) {
            until.store(now + MEMORY, std::memory_order_relaxed);
        }
    }

    bool at(uint64_t now) const { return now < until.load(std::memory_order_relaxed); }

    // Between two measurements of a thread: longer than the kernel's own threads run at a time.
    static constexpr uint64_t WINDOW = 20'000'000;

private:
    // Alone, threads are ready for a hundredth of their time; with one busy process, for a third.
    static constexpr uint64_t SHARE  = 10;
    static constexpr uint64_t MEMORY = 50'000'000;

    std::atomic<uint64_t> until{ 0 };
};

// Returns when n_threads threads have called it with the same two words, which are zero at first and lie on cache lines
// of their own.
using Barrier = void (*)(int * arrived, int * passed, int n_threads);

// Whether threads that read, decode and predict have processors of their own, apart from the computing threads. Without
// them, each stops a computing thread, and at the next barrier all others: then the waiting threads should do this
// work. True before the first barrier.
bool processors_to_spare();

// Null if the system has none (not Linux), or PYORCH_BARRIER=openmp leaves threads to the runtime of OpenMP.
Barrier adaptive_barrier();

} // namespace pyorch
