// Threads that meet at the adaptive barrier, more of them than processors too; and when others want the processors.

#include "check.h"

#include "base/barrier.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

using namespace pyorch;

namespace {

// None passes before all have come, whether they wait awake or asleep: some come late, by more than a wait is awake.
void nobody_passes_early(int n_threads, int n_barriers) {
    const Barrier    barrier = adaptive_barrier();
    alignas(64) int  arrived = 0;
    alignas(64) int  passed  = 0;
    std::vector<int> written(n_threads, 0); // by thread: a plain word, which the barrier must publish
    std::atomic<int> n_early{ 0 };
    const auto       work = [&](int me) {
        for (int i = 1; i <= n_barriers; ++i) {
            if (i % 50 == 0 && me == i / 50 % n_threads) {
                std::this_thread::sleep_for(std::chrono::milliseconds(3));
            }
            written[me] = i;
            barrier(&arrived, &passed, n_threads);
            for (const int other : written) {
                n_early += other != i;
            }
            barrier(&arrived, &passed, n_threads);
        }
    };
    std::vector<std::thread> threads;
    for (int me = 0; me < n_threads; ++me) {
        threads.emplace_back(work, me);
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    CHECK(n_early == 0);
    CHECK(processors_to_spare() == (n_threads < (int) std::thread::hardware_concurrency()));
}

void contention_is_known_and_forgotten() {
    constexpr uint64_t MS = 1'000'000;
    Contention         contention;
    CHECK(!contention.at(1000 * MS));
    contention.note(1000 * MS, 20 * MS, MS); // the kernel's own threads
    CHECK(!contention.at(1000 * MS));
    contention.note(1000 * MS, 20 * MS, 7 * MS); // a busy process took a third
    CHECK(contention.at(1000 * MS) && contention.at(1040 * MS));
    CHECK(!contention.at(1100 * MS)); // a tenth of a second later it is gone
}

} // namespace

int main() {
    contention_is_known_and_forgotten();
    CHECK(processors_to_spare()); // nobody met
    for (const int n_threads : { 2, 3, 16 }) {
        nobody_passes_early(n_threads, 400);
    }
    return 0;
}
