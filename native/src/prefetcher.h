// Turns predictions into reads ahead of demand, on a thread of its own, and keeps to those that pay.
//
// A wrong prefetch takes the disk from what is needed, so how often a prediction of an absent expert came
// true is counted, by layer and rank, whether it was read or not; only those that come true often enough
// are asked for. Demand goes first anyway (see the residency table).

#pragma once

#include "prediction.h"
#include "prefetch_controller.h"
#include "residency.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace pyorch {

// How often predictions of one rank in one layer came true, lately.
class Precision {
public:
    // Of a prediction never seen: between the two, so that it is tried.
    double value() const { return (hits + 1) / (total + 2); }
    void   add(bool hit);

private:
    double hits  = 0;
    double total = 0;
};

class Prefetcher {
public:
    // routers: called when the first layer of a context comes, by then graphs were built.
    Prefetcher(ResidencyTable & table, std::function<std::vector<RouterWeights>()> routers);
    ~Prefetcher();

    Prefetcher(const Prefetcher &) = delete;
    Prefetcher & operator=(const Prefetcher &) = delete;

    using Observer = std::function<void(const void * context, int from, int layer, const std::vector<int32_t> & experts)>;

    // automatic: only while it pays.
    void set(pyorch_predictor kind, int distance, double min_precision, bool automatic);
    void set_default_vectors(int layer, std::vector<float> vectors);
    void set_observer(Observer observer);

    // By compute threads, for each layer of a decoding ubatch: whether routed() wants it.
    bool           wants(const void * context, int layer);
    PredictorNeeds needs() const { return wanted.load(std::memory_order_relaxed); }

    // By compute threads: a layer was routed and its demand is queued. Returns at once.
    void routed(const void * context, RoutedLayer && layer);

private:
    // One context, or one sequence of ubatches.
    struct Stream {
        std::unique_ptr<Predictor>                    predictor;
        std::vector<std::vector<Prediction>>          open; // by layer: predicted, absent then, outcome not known yet
    };

    ResidencyTable &                                table;
    std::function<std::vector<RouterWeights>()>     routers;
    std::atomic<bool>                               wants_layers{false};
    std::atomic<PredictorNeeds>                     wanted{NEEDS_NOTHING};

    std::mutex                                       mutex; // of the queue, and of who decides whether it gets anything
    std::condition_variable                          work;
    bool                                             automatic = false;
    PrefetchController                               controller;
    const void *                                     timed_context = nullptr;
    std::chrono::steady_clock::time_point            token_begin;
    bool                                             stopped = false;
    std::deque<std::pair<const void *, RoutedLayer>> queue;

    std::mutex                                      state_mutex; // of what follows; never taken by a compute thread
    std::map<const void *, Stream>                  streams;
    std::vector<std::vector<Precision>>             precision; // by layer, then distance and rank: see precision_of()
    std::shared_ptr<const DefaultVectors>           defaults;
    Observer                                        observer;
    pyorch_predictor                                kind          = PYORCH_PREDICT_NONE;
    int                                             distance      = 1;
    double                                          min_precision = 0;
    std::thread                                     thread;

    Precision & precision_of(const Prediction & it);
    void run();
    void predict(Stream & stream, const void * context, const RoutedLayer & layer);
};

} // namespace pyorch
