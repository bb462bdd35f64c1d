// Turns forecasts into guesses: experts that the residency table should prefetch, if they gain more than they cost.
//
// It counts how often a guess of an absent expert was right, by layer, distance and rank, whether it was read or not,
// and requests only guesses with enough precision. The loader reads demand first (loading/loader.h).
//
// Not thread-safe. The prefetcher runs it on its own thread, a replay between its events.

#pragma once

#include "prediction/prediction.h"
#include "residency/table.h"

#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace pyorch {

// The predictor of a layer.
struct LayerPrefetch {
    pyorch_predictor kind          = PYORCH_PREDICT_NONE;
    int              distance      = 1; // layers ahead at most
    double           min_precision = 0; // guesses with a lower precision are not read; below 0: those that do not pay
};

class PrefetchPlanner {
public:
    // from: the routed layer, -1 at the beginning of a ubatch.
    using Observer = std::function<void(const void * context, int from, const Forecast & forecast)>;
    // Receives the forecast of a context's next pass through a layer, each expert once, the likeliest first. precision:
    // see LayerPrefetch::min_precision.
    using Above  = std::function<void(
        const void * context, int layer, const std::vector<ForecastExpert> & experts, double precision)>;
    using Oracle = std::function<std::unique_ptr<Predictor>(const std::vector<int> & distance)>;

    // routers: read at the first layer of a context, when its graphs exist. REQUIRES: they outlive this.
    PrefetchPlanner(Table & table, const Routers & routers);

    // Each of these resets counts and collected data.
    void set(int layer, const LayerPrefetch & prefetch);

    // Returns the inputs of predictors to change: default vectors, the estimator and its layers, the maps.
    PredictionModel & change_model();

    // For a replay: sets the predictor that only a replay has.
    void set_oracle(Oracle oracle);

    // Sets the layers that a context computes, ascending. Default: all.
    void set_layers(const void * context, std::vector<int> layers);

    // Removes all data of a context that is gone.
    void forget(const void * context);

    // Forgets routers whose arrays are freed: predictors are made again at the next layer.
    void forget_routers();

    // Layers will compute the forecasts of one layer ahead: they are kept for next_forecasts(), and always read.
    void set_speculative(bool on);

    Observer set_observer(Observer observer); // returns the previous one

    // For a tier above host memory, which uploads missing experts.
    void set_above(Above above);

    bool                                     active() const;
    unsigned                                 needs() const;
    const std::shared_ptr<const Estimator> & estimator() const { return model.estimator; }

    // For each ubatch of a context, and then for its layers.
    void begin(const void * context, const IterationBegin & begin);
    void routed(const void * context, const RoutedLayer & layer);

    // Returns the forecasts of the next layer of this context: one for each token, or none.
    std::vector<Forecast> next_forecasts(const void * context, int layer) const;

private:
    // The state of one context.
    struct Stream {
        std::vector<std::pair<pyorch_predictor, std::unique_ptr<Predictor>>> predictors;
        std::vector<std::vector<ForecastExpert>> open; // by layer: guesses, absent at that time, without outcome yet
        std::vector<Forecast>                    next;
        int                                      n_used = 0;
    };

    Table &                                  table;
    const Routers &                          routers;
    PredictionModel                          model;
    std::vector<const float *>               gates_of; // by layer: the originals of model.gates
    Oracle                                   oracle;
    std::vector<LayerPrefetch>               prefetch;  // by layer
    std::vector<std::vector<Rate>>           precision; // by layer, then distance and rank
    std::map<const void *, std::vector<int>> layers;    // by context
    std::map<const void *, Stream>           streams;
    bool                                     speculative = false;
    Observer                                 observer;
    Above                                    above; // null: no such tier

    Rate &   precision_of(int layer, const ForecastExpert & forecast_expert);
    Stream & stream_of(const void * context);
    void     copy_gates();
    void     plan(Stream & stream, const void * context, int from, std::vector<Forecast> & forecasts);
    void     plan_layer(
        Stream & stream, const void * context, int from, const Forecast * begin, const Forecast * end, bool executed);
};

} // namespace pyorch
