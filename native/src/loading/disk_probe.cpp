#include "loading/disk_probe.h"

#include "base/cpu_time.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <tuple>

namespace pyorch {
namespace {

// Processor seconds of all threads of the process.
double cpu_seconds() { return (double) clock() / CLOCKS_PER_SEC; }

// Orders experts endlessly.
class Probe : private Loader::Orders {
public:
    Probe(const ModelMap & map, std::unique_ptr<Source> source, const ReadPlan & plan) :
            map(map), loader(map, std::move(source), no_codec(), plan.bytes, mutex, *this) {
        loader.nobody_waits();
        for (const MoeLayer & l : map.layers) {
            slot = std::max({ slot, slot_bytes(l, PART_MATRICES), slot_bytes(l, PART_E) + slot_bytes(l, PART_SM) });
        }
        slot      = round_up(slot, PAGE);
        in_flight = plan.depth * std::min(plan.bytes, slot);
        // While the last expert of a round is read, the next one must be ready.
        const int n = (int) std::clamp<uint64_t>((2 * in_flight + slot - 1) / slot, 2, 1024);
        memory.reset((char *) aligned_alloc(PAGE, n * slot));
        if (!memory) {
            throw Failure(PYORCH_MEMORY, format("no memory for %s of reads under way", mebibytes(n * slot).c_str()));
        }
        memset(memory.get(), 1, n * slot); // the first write of a page is no part of a read
        loads.resize(n);
        for (int i = 0; i < n; ++i) {
            loads[i].slot = { 0, memory.get() + i * slot };
            idle.push_back(&loads[i]);
        }
        for (int layer = 0; layer < (int) map.layers.size(); ++layer) {
            for (int expert = 0; expert < map.layers[layer].n_expert; ++expert) {
                if (!map.layers[layer].lacks(expert)) {
                    order.emplace_back(layer, expert);
                }
            }
        }
        if (order.empty()) {
            throw Failure(PYORCH_FORMAT, "there is no expert that could be read");
        }
        std::shuffle(order.begin(), order.end(), std::mt19937(std::random_device()()));
    }

    pyorch_disk_speed measure(const ReadPlan & plan, double seconds) {
        const auto reader = make_reader(loader, plan);
        MutexLock  lock(mutex);
        const auto until = std::chrono::steady_clock::now() +
            std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
        // From here on, as much ends at any time as begins. A slow disk has half of the time for that.
        wanted  = 2 * in_flight;
        started = true;
        loader.wake();
        changed.wait_for(mutex, std::chrono::duration<double>(seconds / 2),
            [this]() REQUIRES(mutex) { return n_read() >= wanted || !error.empty(); });
        const double   cpu   = cpu_seconds();
        const uint64_t begin = clock_ns();
        const uint64_t bytes = n_read();
        wanted               = UINT64_MAX;
        changed.wait_until(mutex, until, [this]() REQUIRES(mutex) { return !error.empty(); });
        wanted = bytes + 1; // on a busy machine not one read may have ended yet
        changed.wait(mutex, [&]() REQUIRES(mutex) { return n_read() >= wanted || !error.empty(); });
        const double took = 1e-9 * (double) (clock_ns() - begin);
        started           = false;
        if (!error.empty()) {
            throw Failure(PYORCH_IO, error);
        }
        return { (double) (n_read() - bytes) / took, (cpu_seconds() - cpu) / took, plan.bytes, plan.depth,
            plan.io_uring ? PYORCH_READER_IO_URING : PYORCH_READER_THREADS, direct, 0 };
    }

private:
    const ModelMap &                       map;
    Mutex                                  mutex;
    CondVar                                changed;
    Loader                                 loader;
    uint64_t                               slot      = 0; // bytes of the largest expert
    uint64_t                               in_flight = 0; // bytes
    std::unique_ptr<char, decltype(&free)> memory{ nullptr, free };
    std::vector<Load>                      loads;
    std::vector<Load *>                    idle GUARDED_BY(mutex);
    std::vector<std::pair<int, int>>       order;
    size_t                                 next GUARDED_BY(mutex)    = 0;
    bool                                   started GUARDED_BY(mutex) = false;
    bool                                   direct GUARDED_BY(mutex)  = true;
    uint64_t                               wanted GUARDED_BY(mutex)  = 0;
    std::string                            error GUARDED_BY(mutex);

    uint64_t n_read() const REQUIRES(mutex) {
        uint64_t n = 0;
        for (int layer = 0; layer < (int) map.layers.size(); ++layer) {
            n += loader.bytes_read(mutex.locked(), layer);
        }
        return n;
    }

    bool order_ahead(const Locked & locked) override {
        mutex.assert_held(locked);
        if (!started || !error.empty() || idle.empty()) {
            return false;
        }
        Load & load = *idle.back();
        idle.pop_back();
        std::tie(load.layer, load.expert) = order[next++ % order.size()];
        for (const Extent & e : extents(map.layers[load.layer], load.expert)) {
            direct = direct && e.direct && loader.bytes().direct(e.file);
        }
        loader.read_ahead(locked, load);
        return true;
    }

    bool order_guess(const Locked &) override { return false; }

    // Decodes nothing: both parts lie in the slot of the matrices.
    Staged stage(const Locked &, Load & load) override {
        load.parts[PART_E].memory  = load.slot.memory;
        load.parts[PART_SM].memory = load.slot.memory + slot_bytes(map.layers[load.layer], PART_E);
        return Staged::YES;
    }

    void published(const Locked &, Load &, int, const char *) override {}

    void failed(const Locked & locked, Load &, const std::string & sentence) override {
        mutex.assert_held(locked);
        error = sentence;
        changed.notify_all();
    }

    void finished(const Locked & locked, Load & load) override {
        mutex.assert_held(locked);
        if (load.ended()) {
            idle.push_back(&load);
            loader.wake(); // the reader may sleep, if a decode thread ends this
        }
        if (n_read() >= wanted) {
            changed.notify_all();
        }
    }
};

} // namespace

pyorch_disk_speed probe_disk(
    const ModelMap & map, std::unique_ptr<Source> source, const ReadPlan & plan, double seconds) {
    return Probe(map, std::move(source), plan).measure(plan, seconds);
}

} // namespace pyorch
