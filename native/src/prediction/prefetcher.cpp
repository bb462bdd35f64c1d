#include "prediction/prefetcher.h"

#include "base/barrier.h"
#include "base/cpu_time.h"
#include "base/placement.h"

#include <algorithm>
#include <utility>

namespace pyorch {

// If more layers or ubatches are queued, the thread gets too little time, and their predictions would come too late. A
// predictor that collects whole iterations gets a longer queue.
static constexpr size_t MAX_WAITING            = 4;
static constexpr size_t MAX_WAITING_COLLECTING = 256;

Prefetcher::Prefetcher(Table & table, const Routers & routers) : table(table), planner(table, routers) {}

Prefetcher::~Prefetcher() {
    {
        MutexLock lock(mutex);
        stopped = true;
    }
    work.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}

void Prefetcher::changed() {
    MutexLock lock(mutex);
    queue.clear();
    settled.notify_all();
    if (planner.active() && !thread.joinable()) {
        thread = std::thread([this] { run(); }); // if that fails, nothing waits for it
    }
    is_active = planner.active();
    wanted    = planner.needs();
}

void Prefetcher::set_automatic(bool automatic_) {
    const double now = table.decoding_absent_bytes();
    MutexLock    lock(mutex);
    automatic    = automatic_;
    predicts     = false;
    lacked       = false;
    trial        = {};
    decode_ns    = 0;
    absent_bytes = now;
}

bool Prefetcher::is_automatic() {
    MutexLock lock(mutex);
    return automatic;
}

void Prefetcher::set_layers(const void * context, const std::vector<int> & layers) {
    MutexLock state_lock(state_mutex);
    planner.set_layers(context, layers);
}

template <typename Waiting>
size_t Prefetcher::count() const {
    return (size_t) std::count_if(
        queue.begin(), queue.end(), [](const auto & queued) { return std::holds_alternative<Waiting>(queued.second); });
}

// Drops the oldest queued ubatch with its layers.
void Prefetcher::drop_iteration() {
    const auto   is_begin = [](const auto & queued) { return std::holds_alternative<IterationBegin>(queued.second); };
    auto         oldest   = std::find_if(queue.begin(), queue.end(), is_begin);
    const void * context  = oldest->first;
    oldest                = queue.erase(oldest);
    const auto next       = std::find_if(
        oldest, queue.end(), [&](const auto & queued) { return queued.first == context && is_begin(queued); });
    queue.erase(std::remove_if(oldest, next, [&](const auto & queued) { return queued.first == context; }), next);
    settled.notify_all();
}

void Prefetcher::begin(const void * context, IterationBegin && iteration) {
    const bool   collecting = needs() & PYORCH_NEEDS_DISTRIBUTIONS;
    const double now        = iteration.decode ? table.decoding_absent_bytes() : 0;
    MutexLock    lock(mutex);
    if (automatic) {
        const uint64_t before = std::exchange(decode_ns, iteration.decode ? clock_ns() : 0);
        if (iteration.decode) {
            const double absent = now - std::exchange(absent_bytes, now);
            if (lacked) { // otherwise the trial did not decide about the ubatch
                trial.add(before ? 1e-9 * (double) (decode_ns - before) : 0, absent);
            }
            lacked   = absent > 0;
            predicts = lacked && trial.on();
            if (!predicts) {
                return;
            }
        }
    }
    if (count<IterationBegin>() >= (collecting ? MAX_WAITING_COLLECTING : MAX_WAITING)) {
        drop_iteration();
    }
    queue.emplace_back(context, std::move(iteration));
    lock.unlock();
    work.notify_one();
}

bool Prefetcher::wants() {
    if (!active()) {
        return false;
    }
    MutexLock lock(mutex);
    return !automatic || predicts;
}

void Prefetcher::routed(const void * context, RoutedLayer && layer) {
    const bool collecting = needs() & PYORCH_NEEDS_DISTRIBUTIONS;
    {
        MutexLock lock(mutex);
        // Predicting takes less time than waking the thread, which would stop a compute thread.
        if (layer.decode && !collecting && !processors_to_spare() && queue.empty() && !predicting) {
            predict(context, std::move(layer));
            return;
        }
        if (count<RoutedLayer>() >= (collecting ? MAX_WAITING_COLLECTING : MAX_WAITING)) {
            queue.erase(std::find_if(queue.begin(), queue.end(),
                [](const auto & queued) { return std::holds_alternative<RoutedLayer>(queued.second); }));
        }
        queue.emplace_back(context, std::move(layer));
    }
    work.notify_one();
}

void Prefetcher::settle(const void * context) {
    MutexLock lock(mutex);
    settled.wait(mutex, [&]() REQUIRES(mutex) {
        return predicting != context &&
            std::none_of(queue.begin(), queue.end(), [&](const auto & queued) { return queued.first == context; });
    });
}

std::vector<Forecast> Prefetcher::next_forecasts(const void * context, int layer) {
    settle(context);
    MutexLock state_lock(state_mutex);
    return planner.next_forecasts(context, layer);
}

void Prefetcher::wait_idle() {
    MutexLock lock(mutex);
    settled.wait(mutex, [&]() REQUIRES(mutex) { return !predicting && queue.empty(); });
}

void Prefetcher::forget(const void * context) {
    // A predictor that collects gets all queued events, unless its own thread waits, in an observer.
    const bool collecting = needs() & PYORCH_NEEDS_DISTRIBUTIONS;
    {
        MutexLock lock(mutex);
        if (!collecting || std::this_thread::get_id() == thread.get_id()) {
            queue.erase(std::remove_if(
                            queue.begin(), queue.end(), [&](const auto & queued) { return queued.first == context; }),
                queue.end());
        }
    }
    settled.notify_all(); // the queue may have held events that others wait for
    settle(context);
    MutexLock state_lock(state_mutex);
    planner.forget(context);
}

void Prefetcher::forget_routers() {
    MutexLock state_lock(state_mutex);
    planner.forget_routers();
}

void Prefetcher::run() {
    MutexLock lock(mutex);
    while (true) {
        work.wait(mutex, [&]() REQUIRES(mutex) { return stopped || !queue.empty(); });
        if (stopped) {
            return;
        }
        const auto [context, event] = std::move(queue.front());
        queue.pop_front();
        place_thread(false);
        predict(context, event);
    }
}

// Unlocks the mutex during the prediction.
void Prefetcher::predict(const void * context, const Event & event) {
    predicting = context;
    {
        MutexUnlock unlock(mutex);
        MutexLock   state_lock(state_mutex);
        if (const auto * layer = std::get_if<RoutedLayer>(&event)) {
            planner.routed(context, *layer);
        } else {
            planner.begin(context, std::get<IterationBegin>(event));
        }
    }
    predicting = nullptr;
    settled.notify_all();
}

} // namespace pyorch
