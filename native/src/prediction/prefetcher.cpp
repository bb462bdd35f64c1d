#include "prediction/prefetcher.h"

#include <algorithm>

namespace pyorch {

// More layers than this waiting: the thread does not get its turn, and what it would predict has passed. A predictor
// that collects whole iterations is shown all of them.
static constexpr int MAX_WAITING            = 4;
static constexpr int MAX_WAITING_COLLECTING = 256;

// An expert that is read faster than this is there as soon as it is asked for: predicting it takes longer.
static constexpr double LEAST_READ_SECONDS = 100e-6;

Prefetcher::Prefetcher(Table & table, const Routers & routers) : table(table), planner(table, routers) {}

Prefetcher::~Prefetcher() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
    }
    work.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}

// REQUIRES: state_mutex
void Prefetcher::changed() {
    std::lock_guard<std::mutex> lock(mutex);
    queue.clear();
    settled.notify_all();
    if (planner.active() && !thread.joinable()) {
        thread = std::thread([this] { run(); }); // where it cannot be had, nothing waits for it
    }
    is_active = planner.active();
    wanted    = planner.needs();
}

void Prefetcher::set_automatic(bool automatic_) {
    std::lock_guard<std::mutex> lock(mutex);
    automatic     = automatic_;
    controller    = {};
    timed_context = nullptr;
}

bool Prefetcher::is_automatic() {
    std::lock_guard<std::mutex> lock(mutex);
    return automatic;
}

void Prefetcher::set_layers(const void * context, const std::vector<int> & layers) {
    std::lock_guard<std::mutex> state_lock(state_mutex);
    planner.set_layers(context, layers);
}

bool Prefetcher::can_pay() {
    const double rate = table.read_bytes_per_second();
    return rate == 0 || (double) table.map.layers[0].slot_bytes() / rate >= LEAST_READ_SECONDS;
}

void Prefetcher::begin(const void * context, IterationBegin && it) {
    std::unique_lock<std::mutex> lock(mutex);
    if (automatic && it.decode) {
        pays = can_pay();
        const auto now = std::chrono::steady_clock::now();
        // Contexts that run at once would be taken for one slow token.
        if (timed_context == context) {
            controller.token(std::chrono::duration<double>(now - token_begin).count());
        }
        timed_context = context;
        token_begin   = now;
        if (!pays || !controller.on()) {
            return;
        }
    }
    queue.emplace_back(context, std::move(it));
    lock.unlock();
    work.notify_one();
}

bool Prefetcher::wants() {
    if (!active()) {
        return false;
    }
    std::lock_guard<std::mutex> lock(mutex);
    return !automatic || (pays && controller.on());
}

void Prefetcher::routed(const void * context, RoutedLayer && layer) {
    const bool collecting = needs() & (NEEDS_PROBS | NEEDS_PREFILL);
    {
        std::lock_guard<std::mutex> lock(mutex);
        const auto is_layer = [](const auto & it) { return std::holds_alternative<RoutedLayer>(it.second); };
        if (std::count_if(queue.begin(), queue.end(), is_layer) >= (collecting ? MAX_WAITING_COLLECTING : MAX_WAITING)) {
            queue.erase(std::find_if(queue.begin(), queue.end(), is_layer));
        }
        queue.emplace_back(context, std::move(layer));
    }
    work.notify_one();
}

void Prefetcher::settle(const void * context) {
    std::unique_lock<std::mutex> lock(mutex);
    settled.wait(lock, [&] {
        return predicting != context && std::none_of(queue.begin(), queue.end(), [&](const auto & it) { return it.first == context; });
    });
}

std::vector<Forecast> Prefetcher::next_forecasts(const void * context, int layer) {
    settle(context);
    std::lock_guard<std::mutex> state_lock(state_mutex);
    return planner.next_forecasts(context, layer);
}

void Prefetcher::wait_idle() {
    std::unique_lock<std::mutex> lock(mutex);
    settled.wait(lock, [&] { return !predicting && queue.empty(); });
}

void Prefetcher::forget(const void * context) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        queue.erase(std::remove_if(queue.begin(), queue.end(), [&](const auto & it) { return it.first == context; }), queue.end());
        timed_context = timed_context == context ? nullptr : timed_context;
    }
    settled.notify_all(); // what others wait for may have been in the queue
    settle(context);
    std::lock_guard<std::mutex> state_lock(state_mutex);
    planner.forget(context);
}

void Prefetcher::forget_routers() {
    std::lock_guard<std::mutex> state_lock(state_mutex);
    planner.forget_routers();
}

void Prefetcher::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        work.wait(lock, [&] { return stopped || !queue.empty(); });
        if (stopped) {
            return;
        }
        const auto [context, event] = std::move(queue.front());
        queue.pop_front();
        predicting = context;
        lock.unlock();
        {
            std::lock_guard<std::mutex> state_lock(state_mutex);
            if (const auto * layer = std::get_if<RoutedLayer>(&event)) {
                planner.routed(context, *layer);
            } else {
                planner.begin(context, std::get<IterationBegin>(event));
            }
        }
        lock.lock();
        predicting = nullptr;
        settled.notify_all();
    }
}

} // namespace pyorch
