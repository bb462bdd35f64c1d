// Turns forecasts into guesses: experts that the residency table should read ahead, and keeps to what pays.
//
// How often a guess of an absent expert came true is counted, by layer, distance and rank, whether it was read or not;
// only those that come true often enough are asked for. Demand goes first anyway (see the residency table).
//
// Not thread-safe. The prefetcher runs it on a thread of its own, a replay in the course of its events.

#pragma once

#include "prediction/prediction.h"
#include "residency/table.h"

#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace pyorch {

// What predicts a layer.
struct LayerPrefetch {
    pyorch_predictor kind     = PYORCH_PREDICT_NONE;
    int              distance = 1; // layers ahead at most
    double min_precision      = 0; // guesses that come true less often are not read; below 0: those that do not pay
};

class PrefetchPlanner {
public:
    // from: the layer that was routed, -1 where a ubatch begins.
    using Observer = std::function<void(const void * context, int from, const Forecast & forecast)>;
    // What is forecast of the next pass of a context through a layer, each expert once, the likeliest first. precision:
    // as LayerPrefetch::min_precision.
    using Above  = std::function<void(
        const void * context, int layer, const std::vector<ForecastExpert> & experts, double precision)>;
    using Oracle = std::function<std::unique_ptr<Predictor>(const std::vector<int> & distance)>;

    // routers: asked when the first layer of a context comes, by then graphs were built. Outlives this.
    PrefetchPlanner(Table & table, const Routers & routers);

    // Each begins anew what was counted and collected.
    void set(int layer, const LayerPrefetch & prefetch);

    // What predictors are made of: default vectors, the estimator and the layers that hybrid takes it for, the maps.
    PredictionModel & change_model();

    // For a replay: makes the predictor that only a replay has.
    void set_oracle(Oracle oracle);

    // Which layers a context computes, ascending. Without it: all.
    void set_layers(const void * context, std::vector<int> layers);

    // The context is gone, and all that was collected of it goes.
    void forget(const void * context);

    // Some of the routers' arrays go: predictors are made anew when a layer next comes.
    void forget_routers();

    // What is forecast one layer ahead will be executed: it is kept for next_forecasts(), and read in any case.
    void set_speculative(bool on);

    Observer set_observer(Observer observer); // returns the one before

    // For a tier above host memory, which brings what it lacks.
    void set_above(Above above);

    bool                                     active() const;
    unsigned                                 needs() const;
    const std::shared_ptr<const Estimator> & estimator() const { return model.estimator; }

    // By context, for each of its ubatches and then for their layers.
    void begin(const void * context, const IterationBegin & begin);
    void routed(const void * context, const RoutedLayer & layer);

    // Of the layer that comes next in this context: one for each token, or none.
    std::vector<Forecast> next_forecasts(const void * context, int layer) const;

private:
    // What is known of one context.
    struct Stream {
        std::vector<std::pair<pyorch_predictor, std::unique_ptr<Predictor>>> predictors;
        std::vector<std::vector<ForecastExpert>> open; // by layer: guessed, absent then, outcome not known yet
        std::vector<Forecast>                    next;
        int                                      n_used = 0;
    };

    Table &                                  table;
    const Routers &                          routers;
    PredictionModel                          model;
    std::vector<const float *>               gates_of; // by layer: of what model.gates are copies
    Oracle                                   oracle;
    std::vector<LayerPrefetch>               prefetch;  // by layer
    std::vector<std::vector<Rate>>           precision; // by layer, then distance and rank
    std::map<const void *, std::vector<int>> layers;    // by context
    std::map<const void *, Stream>           streams;
    bool                                     speculative = false;
    Observer                                 observer;
    Above                                    above; // null: there is no such tier

    Rate &   precision_of(int layer, const ForecastExpert & forecast_expert);
    Stream & stream_of(const void * context);
    void     copy_gates();
    void     plan(Stream & stream, const void * context, int from, std::vector<Forecast> & forecasts);
    void     plan_layer(
        Stream & stream, const void * context, int from, const Forecast * begin, const Forecast * end, bool executed);
};

} // namespace pyorch
