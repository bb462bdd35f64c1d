// The prefetch planner on a thread of its own, beside the compute threads that tell it what is routed, or on one of
// them.

#pragma once

#include "base/mutex.h"
#include "prediction/prediction_trial.h"
#include "prediction/prefetch_planner.h"

#include <atomic>
#include <deque>
#include <thread>
#include <variant>

namespace pyorch {

class Prefetcher {
public:
    Prefetcher(Table & table, const Routers & routers);
    ~Prefetcher();

    Prefetcher(const Prefetcher &)             = delete;
    Prefetcher & operator=(const Prefetcher &) = delete;

    // Changes the planner's settings between two predictions; what waits for one is forgotten.
    template <typename Change>
    void change(Change change) {
        MutexLock state_lock(state_mutex);
        change(planner);
        changed();
    }

    // automatic: only while experts are absent, and unless a trial tells that decoding is sooner without.
    void set_automatic(bool automatic);
    bool is_automatic();

    // Which layers a context computes, ascending: known once its graphs were built.
    void set_layers(const void * context, const std::vector<int> & layers);

    // By compute threads. active: whether begin() and routed() want anything at all.
    bool     active() const { return is_active.load(std::memory_order_relaxed); }
    unsigned needs() const { return wanted.load(std::memory_order_relaxed); }
    void     begin(const void * context, IterationBegin && iteration);

    // By compute threads: whether routed() wants a layer of a narrow ubatch now.
    bool wants();

    // By compute threads: a layer was routed and its demand is queued. Returns at once, or predicts itself where the
    // thread would have no processor.
    void routed(const void * context, RoutedLayer && layer);

    // By compute threads: sleeps until nothing of the context waits for a prediction.
    std::vector<Forecast> next_forecasts(const void * context, int layer);

    // The same, for who uses forecasts otherwise.
    void settle(const void * context);

    // Sleeps until nothing waits for a prediction.
    void wait_idle();

    // Nothing is computed in the context any more, and nothing will. Sleeps until no predictor works for it, and one
    // that collects has collected all; from then on none reads what it or its model owns.
    void forget(const void * context);

    // The arrays of some routers go: the predictors that apply them too.
    void forget_routers();

private:
    using Event = std::variant<IterationBegin, RoutedLayer>;

    std::atomic<bool>     is_active{ false };
    std::atomic<unsigned> wanted{ 0 };

    Mutex                                      mutex; // of the queue, and of who decides whether it gets anything
    CondVar                                    work;
    CondVar                                    settled;
    std::deque<std::pair<const void *, Event>> queue GUARDED_BY(mutex);
    const void *                               predicting GUARDED_BY(mutex) = nullptr; // whose event is at work

    bool            automatic GUARDED_BY(mutex) = false;
    bool            predicts GUARDED_BY(mutex)  = false; // of automatic: in the ubatch that decodes
    bool            lacked GUARDED_BY(mutex)    = false; // experts were absent in the ubatch before that
    PredictionTrial trial GUARDED_BY(mutex);
    uint64_t        decode_ns GUARDED_BY(mutex)    = 0; // when the last ubatch began; 0: it was a prompt's
    double          absent_bytes GUARDED_BY(mutex) = 0; // of the table, when that ubatch began
    bool            stopped GUARDED_BY(mutex)      = false;

    Table &         table;
    Mutex           state_mutex; // before the other; compute threads take it to speculate only
    PrefetchPlanner planner GUARDED_BY(state_mutex);
    std::thread     thread GUARDED_BY(mutex);

    template <typename Waiting>
    size_t count() const REQUIRES(mutex);

    void drop_iteration() REQUIRES(mutex);
    void changed() REQUIRES(state_mutex);
    void run();
    void predict(const void * context, const Event & event) REQUIRES(mutex);
};

} // namespace pyorch
