#include "prediction/prefetch_planner.h"

#include <algorithm>
#include <utility>

namespace pyorch {

PrefetchPlanner::PrefetchPlanner(Table & table, const Routers & routers) :
        table(table), routers(routers), prefetch(table.map.layers.size()), precision(table.map.layers.size()) {
    model.gates.resize(prefetch.size());
    model.defaults.resize(prefetch.size());
    gates_of.resize(prefetch.size());
    model.n_expert = table.map.n_experts();
}

void PrefetchPlanner::set(int layer, const LayerPrefetch & layer_prefetch) {
    prefetch[layer] = layer_prefetch;
    precision[layer].assign((size_t) layer_prefetch.distance * model.n_expert[layer], Rate(0.5));
    streams.clear();
}

PredictionModel & PrefetchPlanner::change_model() {
    streams.clear();
    return model;
}

void PrefetchPlanner::set_oracle(Oracle oracle_) {
    oracle = std::move(oracle_);
    streams.clear();
}

void PrefetchPlanner::set_speculative(bool on) {
    speculative = on;
    streams.clear();
}

void PrefetchPlanner::set_layers(const void * context, std::vector<int> layers_) {
    layers[context] = std::move(layers_);
    streams.erase(context);
}

void PrefetchPlanner::forget(const void * context) {
    layers.erase(context);
    streams.erase(context);
}

void PrefetchPlanner::forget_routers() {
    streams.clear();
    std::fill(model.gates.begin(), model.gates.end(), nullptr);
    std::fill(gates_of.begin(), gates_of.end(), nullptr);
}

PrefetchPlanner::Observer PrefetchPlanner::set_observer(Observer observer_) {
    return std::exchange(observer, std::move(observer_));
}

void PrefetchPlanner::set_above(Above above_) { above = std::move(above_); }

bool PrefetchPlanner::active() const {
    return std::any_of(prefetch.begin(), prefetch.end(),
        [](const LayerPrefetch & layer_prefetch) { return layer_prefetch.kind != PYORCH_PREDICT_NONE; });
}

unsigned PrefetchPlanner::needs() const {
    unsigned needs = 0;
    for (const LayerPrefetch & layer_prefetch : prefetch) {
        needs |= needs_of(layer_prefetch.kind);
    }
    return needs;
}

PrefetchPlanner::Stream & PrefetchPlanner::stream_of(const void * context) {
    Stream & stream = streams[context];
    if (!stream.open.empty()) {
        return stream;
    }
    stream.open.resize(prefetch.size());
    model.routers = routers.all();
    copy_gates();
    for (int kind = PYORCH_PREDICT_NONE + 1; kind <= PYORCH_PREDICT_ORACLE; ++kind) {
        std::vector<int> distance;
        for (const LayerPrefetch & layer_prefetch : prefetch) {
            distance.push_back(layer_prefetch.kind == kind ? layer_prefetch.distance : 0);
        }
        if (*std::max_element(distance.begin(), distance.end()) == 0) {
            continue;
        }
        auto predictor = make_predictor((pyorch_predictor) kind, model, distance);
        if (kind == PYORCH_PREDICT_ORACLE && oracle) {
            predictor = oracle(distance);
        }
        if (predictor) {
            stream.predictors.push_back({ (pyorch_predictor) kind, std::move(predictor) });
        }
    }
    return stream;
}

// Makes one copy for all contexts, when a predictor first applies the routers.
void PrefetchPlanner::copy_gates() {
    for (size_t layer = 0; (needs() & PYORCH_NEEDS_ROUTERS) && layer < model.routers.size(); ++layer) {
        const Router & router = model.routers[layer];
        if (router.gate != gates_of[layer]) {
            gates_of[layer] = router.gate;
            model.gates[layer] =
                router ? std::make_shared<const CompactMatrix>(router.gate, router.n_expert, router.n_embd) : nullptr;
        }
    }
}

void PrefetchPlanner::begin(const void * context, const IterationBegin & iteration) {
    Stream & stream = stream_of(context);
    stream.next.clear();
    std::vector<Forecast> forecasts;
    for (auto & [kind, predictor] : stream.predictors) {
        predictor->begin(iteration, forecasts);
    }
    plan(stream, context, -1, forecasts);
}

void PrefetchPlanner::routed(const void * context, const RoutedLayer & routed_layer) {
    Stream & stream = stream_of(context);
    auto &   open   = stream.open[routed_layer.layer];
    for (const ForecastExpert & guess : open) {
        const bool came_true = std::find(routed_layer.experts.begin(), routed_layer.experts.end(), guess.expert) !=
            routed_layer.experts.end();
        precision_of(routed_layer.layer, guess).add(came_true);
    }
    open.clear();

    std::vector<Forecast> forecasts;
    for (auto & [kind, predictor] : stream.predictors) {
        if (routed_layer.decode || (needs_of(kind) & (PYORCH_NEEDS_FUTURE | PYORCH_NEEDS_ROUTERS)) || speculative) {
            predictor->routed(routed_layer, forecasts);
        }
    }
    stream.next.clear();
    stream.n_used = routed_layer.n_used;
    plan(stream, context, routed_layer.layer, forecasts);
}

std::vector<Forecast> PrefetchPlanner::next_forecasts(const void * context, int layer) const {
    const auto found = streams.find(context);
    if (found == streams.end() || found->second.next.empty() || found->second.next.front().layer != layer) {
        return {};
    }
    return found->second.next;
}

Rate & PrefetchPlanner::precision_of(int layer, const ForecastExpert & forecast_expert) {
    return precision[layer][(size_t) (forecast_expert.distance - 1) * model.n_expert[layer] + forecast_expert.rank];
}

void PrefetchPlanner::plan(Stream & stream, const void * context, int from, std::vector<Forecast> & forecasts) {
    // The outcome of a guess would never be known for a layer that the context does not compute.
    if (const auto computed = layers.find(context); computed != layers.end()) {
        const auto is_passed_over = [&](const Forecast & new_forecast) {
            return !std::binary_search(computed->second.begin(), computed->second.end(), new_forecast.layer);
        };
        forecasts.erase(std::remove_if(forecasts.begin(), forecasts.end(), is_passed_over), forecasts.end());
    }
    std::stable_sort(
        forecasts.begin(), forecasts.end(), [](const Forecast & a, const Forecast & b) { return a.layer < b.layer; });
    for (size_t i = 0, end; i < forecasts.size(); i = end) {
        const bool executed =
            speculative && from >= 0 && forecasts[i].layer == from + 1 && !forecasts[i].weights.empty();
        for (end = i; end < forecasts.size() && forecasts[end].layer == forecasts[i].layer; ++end) {
            if (observer) {
                observer(context, from, forecasts[end]);
            }
            if (executed) {
                stream.next.push_back(forecasts[end]);
            }
        }
        plan_layer(stream, context, from, &forecasts[i], &forecasts[i] + (end - i), executed);
    }
}

// begin, end: forecasts of one layer, for the tokens of a ubatch. executed: the layer computes the first n_used of
// each.
void PrefetchPlanner::plan_layer(
    Stream & stream, const void * context, int from, const Forecast * begin, const Forecast * end, bool executed) {
    const int                   layer = begin->layer;
    std::vector<ForecastExpert> guesses;
    for (const Forecast * f = begin; f < end; ++f) {
        for (int rank = 0; rank < (int) f->experts.size(); ++rank) {
            guesses.push_back({ f->experts[rank], rank, f->distance });
        }
    }
    // Several tokens may need the same expert: its best rank counts.
    std::stable_sort(guesses.begin(), guesses.end(),
        [](const ForecastExpert & a, const ForecastExpert & b) { return a.rank < b.rank; });
    std::vector<uint8_t>        seen(model.n_expert[layer]);
    std::vector<ForecastExpert> each;
    std::vector<Table::Want>    wants;
    const double                limit = prefetch[layer].min_precision;
    const double                least = limit < 0 ? table.break_even() : limit;
    for (const ForecastExpert & forecast_expert : guesses) {
        if (!seen[forecast_expert.expert]) {
            seen[forecast_expert.expert] = 1;
            const double p =
                executed ? forecast_expert.rank < stream.n_used : precision_of(layer, forecast_expert).value();
            each.push_back(forecast_expert);
            wants.push_back({ forecast_expert.expert, p, executed ? p > 0 : p >= least, false });
        }
    }
    // For several tokens, use counts say more about what to keep than forecasts do.
    if (!begin->probability.empty() && end - begin == 1) {
        table.expect(context, layer, from, begin->probability);
    }
    table.want(context, layer, from, wants);
    if (above) {
        above(context, layer, each, limit);
    }
    auto & open = stream.open[layer];
    for (size_t i = 0; i < wants.size(); ++i) {
        if (wants[i].absent) {
            open.push_back(each[i]);
        }
    }
}

} // namespace pyorch
