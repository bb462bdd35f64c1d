#include "base/barrier.h"

#include <thread>

static std::atomic<int> n_meeting{ 1 };

// Asked at load: a thread that is placed on some processors later would see only these.
static const int n_processors = (int) std::thread::hardware_concurrency(); // 0: not known

bool pyorch::processors_to_spare() {
    return n_processors == 0 || n_meeting.load(std::memory_order_relaxed) < n_processors;
}

#ifdef __linux__

#include "base/cpu_time.h"
#include "base/placement.h"

#include <climits>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pyorch {
namespace {

// Time to wait awake: alone, more than the threads' times between two barriers differ; otherwise less than the cost of
// waking one.
constexpr uint64_t AWAKE = 2'000'000, AWAKE_CONTENDED = 20'000;

// `passed` counts barriers in steps of two; its lowest bit means that a thread sleeps.
constexpr int ASLEEP = 1;

// Rounds of waiting between two reads of the clock.
constexpr int ROUNDS = 64;

Contention contention;

// The run delay of the calling thread.
class RunDelay {
public:
    RunDelay() : file(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {}
    ~RunDelay() {
        if (file >= 0) {
            close(file);
        }
    }

    void look(uint64_t now) {
        if (now < last + Contention::WINDOW) {
            return;
        }
        uint64_t total;
        if (!read(total)) { // in a sandbox, or with an old kernel: as if others needed the processors
            contention.note(now, 0, 1);
            return;
        }
        if (last > 0) {
            contention.note(now, now - last, total - delay);
        }
        last  = now;
        delay = total;
    }

private:
    // "nanoseconds run, nanoseconds ready, number of times run"
    bool read(uint64_t & total) const {
        char          text[96];
        const ssize_t size        = file >= 0 ? pread(file, text, sizeof(text) - 1, 0) : -1;
        text[size > 0 ? size : 0] = 0;
        const char * second       = std::strchr(text, ' ');
        total                     = second ? std::strtoull(second, nullptr, 10) : 0;
        return second;
    }

    const int file;
    uint64_t  last  = 0;
    uint64_t  delay = 0;
};

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

void futex(int * word, int operation, int value) {
    syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

void meet(int * arrived, int * passed, int n_threads) {
    place_thread(true);
    if (n_meeting.load(std::memory_order_relaxed) != n_threads) {
        n_meeting.store(n_threads, std::memory_order_relaxed);
    }
    const int before = __atomic_load_n(passed, __ATOMIC_RELAXED) & ~ASLEEP; // it cannot change without this thread
    if (__atomic_fetch_add(arrived, 1, __ATOMIC_SEQ_CST) == n_threads - 1) {
        __atomic_store_n(arrived, 0, __ATOMIC_RELAXED);
        const int after = (int) ((unsigned) before + 2);
        if (__atomic_exchange_n(passed, after, __ATOMIC_SEQ_CST) & ASLEEP) {
            futex(passed, FUTEX_WAKE, INT_MAX);
        }
        return;
    }
    const auto over = [&] { return (__atomic_load_n(passed, __ATOMIC_SEQ_CST) & ~ASLEEP) != before; };
    const auto spin = [&] {
        for (int i = 0; i < ROUNDS; ++i) {
            if (over()) {
                return true;
            }
            relax();
        }
        return false;
    };
    if (spin()) {
        return;
    }
    thread_local RunDelay run_delay;
    const uint64_t        begin = clock_ns();
    run_delay.look(begin);
    const uint64_t until = begin + (contention.at(begin) ? AWAKE_CONTENDED : AWAKE);
    do {
        if (spin()) {
            return;
        }
    } while (clock_ns() < until);
    while (!over()) {
        int seen = before;
        if (__atomic_compare_exchange_n(passed, &seen, before | ASLEEP, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ||
            seen == (before | ASLEEP)) {
            futex(passed, FUTEX_WAIT, before | ASLEEP);
        }
    }
}

} // namespace

Barrier adaptive_barrier() {
    const char * said = std::getenv("PYORCH_BARRIER");
    return said && std::strcmp(said, "openmp") == 0 ? nullptr : meet;
}

} // namespace pyorch

#else

namespace pyorch {

Barrier adaptive_barrier() { return nullptr; }

} // namespace pyorch

#endif
