// A barrier whose threads wait awake as long as that costs nobody anything, and asleep where others want the processors.
//
// To wake a thread costs a tenth of a millisecond in a virtual machine, and a token has hundreds of barriers. A thread
// that waits awake beside a busy process keeps a processor from the one that it waits for. So the threads look at how
// long they stood ready lately without a processor (run_delay of the kernel's schedstat): no number of rounds to spin
// fits both machines.

#pragma once

#include <atomic>
#include <cstdint>

namespace pyorch {

// Whether others want the processors on which threads meet. All times are nanoseconds of clock_ns().
class Contention {
public:
    // A thread stood ready without a processor for `delayed` of the last `elapsed` until now.
    void note(uint64_t now, uint64_t elapsed, uint64_t delayed) {
        if (delayed * SHARE > elapsed) {
            until.store(now + MEMORY, std::memory_order_relaxed);
        }
    }

    bool at(uint64_t now) const { return now < until.load(std::memory_order_relaxed); }

    // Between two looks of a thread: longer than what the kernel's own threads take at a time.
    static constexpr uint64_t WINDOW = 20'000'000;

private:
    // Alone, threads stand ready for a hundredth of their time; beside one busy process, for a third.
    static constexpr uint64_t SHARE  = 10;
    static constexpr uint64_t MEMORY = 50'000'000;

    std::atomic<uint64_t> until{ 0 };
};

// Returns when n_threads threads have called it with the same two words, which are zero at first and lie on cache lines
// of their own.
using Barrier = void (*)(int * arrived, int * passed, int n_threads);

// Whether threads that read, decode and predict have processors beside those of the threads that met lately. Where they
// have none, each stops a thread that computes, and with it all others at their next barrier: then work that threads can
// do while they wait is theirs. True where nobody met.
bool processors_to_spare();

// Null where there is none: not Linux, or PYORCH_BARRIER=openmp leaves threads to the runtime of OpenMP.
Barrier adaptive_barrier();

} // namespace pyorch
