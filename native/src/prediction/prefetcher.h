// Runs the prefetch planner on its own thread, or on the compute thread that routed a layer.

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

    // Changes the planner's settings between two predictions, and drops queued events.
    template <typename Change>
    void change(Change change) {
        MutexLock state_lock(state_mutex);
        change(planner);
        changed();
    }

    // automatic: predict only while experts are absent, and stop if a trial shows that decoding is faster without.
    void set_automatic(bool automatic);
    bool is_automatic();

    // Sets the layers that a context computes, ascending: known once its graphs are built.
    void set_layers(const void * context, const std::vector<int> & layers);

    // For compute threads. active: whether begin() and routed() are needed at all.
    bool     active() const { return is_active.load(std::memory_order_relaxed); }
    unsigned needs() const { return wanted.load(std::memory_order_relaxed); }
    void     begin(const void * context, IterationBegin && iteration);

    // For compute threads: whether routed() needs a layer of a narrow ubatch now.
    bool wants();

    // For compute threads: a layer was routed and its demand is queued. Returns at once, or predicts itself if the
    // thread would have no processor.
    void routed(const void * context, RoutedLayer && layer);

    // For compute threads: sleeps until no event of the context waits for a prediction.
    std::vector<Forecast> next_forecasts(const void * context, int layer);

    // The same, for callers that use forecasts in another way.
    void settle(const void * context);

    // Sleeps until no event waits for a prediction.
    void wait_idle();

    // Ends a context in which nothing is computed any more. Sleeps until no predictor works for it and collected data
    // are complete; after that none reads what the context or its model owns.
    void forget(const void * context);

    // Forgets some routers whose arrays are freed, and the predictors that apply them.
    void forget_routers();

private:
    using Event = std::variant<IterationBegin, RoutedLayer>;

    std::atomic<bool>     is_active{ false };
    std::atomic<unsigned> wanted{ 0 };

    Mutex                                      mutex; // of the queue, and of the decision whether it gets events
    CondVar                                    work;
    CondVar                                    settled;
    std::deque<std::pair<const void *, Event>> queue GUARDED_BY(mutex);
    const void * predicting GUARDED_BY(mutex) = nullptr; // the context of the present event

    bool            automatic GUARDED_BY(mutex) = false;
    bool            predicts GUARDED_BY(mutex)  = false; // automatic: in the present decoding ubatch
    bool            lacked GUARDED_BY(mutex)    = false; // experts were absent in the ubatch before
    PredictionTrial trial GUARDED_BY(mutex);
    uint64_t        decode_ns GUARDED_BY(mutex)    = 0; // beginning of the last ubatch; 0: it was a prompt's
    double          absent_bytes GUARDED_BY(mutex) = 0; // of the table at that beginning
    bool            stopped GUARDED_BY(mutex)      = false;

    Table &         table;
    Mutex           state_mutex; // locked before the other; compute threads take it only to speculate
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
