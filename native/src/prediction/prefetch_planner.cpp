#include "prediction/prefetch_planner.h"

#include <algorithm>
#include <utility>
#include <numeric>

namespace pyorch {

PrefetchPlanner::PrefetchPlanner(Table & table, const Routers & routers) :
        table(table), routers(routers), prefetch(table.map.layers.size()), precision(table.map.layers.size()) {
    model.gates.resize(prefetch.size());
    model.defaults.resize(prefetch.size());
    gates_of.resize(prefetch.size());
    for (const auto & l : table.map.layers) {
        model.n_expert.push_back(l.n_expert);
    }
}

void PrefetchPlanner::set(int layer, const LayerPrefetch & it) {
    prefetch[layer] = it;
    precision[layer].assign((size_t) it.distance * model.n_expert[layer], Rate(0.5));
    streams.clear();
}

void PrefetchPlanner::set_default_vectors(int layer, std::shared_ptr<const CompactMatrix> vectors) {
    model.defaults[layer] = std::move(vectors);
    streams.clear();
}

void PrefetchPlanner::set_estimator(std::shared_ptr<const Estimator> estimator) {
    model.estimator = std::move(estimator);
    streams.clear();
}

void PrefetchPlanner::set_estimated(std::vector<uint8_t> layers) {
    model.estimated = std::move(layers);
    streams.clear();
}

void PrefetchPlanner::set_maps(std::shared_ptr<ExpertMaps> maps) {
    model.maps = std::move(maps);
    streams.clear();
}

void PrefetchPlanner::set_maker(Maker maker_) {
    maker = std::move(maker_);
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
    return std::any_of(
        prefetch.begin(), prefetch.end(), [](const LayerPrefetch & it) { return it.kind != PYORCH_PREDICT_NONE; });
}

unsigned PrefetchPlanner::needs() const {
    unsigned needs = NEEDS_NOTHING;
    for (const LayerPrefetch & it : prefetch) {
        needs |= needs_of(it.kind);
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
    if (const auto of_context = layers.find(context); of_context != layers.end()) {
        model.layers = of_context->second;
    } else {
        model.layers.resize(prefetch.size());
        std::iota(model.layers.begin(), model.layers.end(), 0);
    }
    for (int kind = PYORCH_PREDICT_NONE + 1; kind <= PYORCH_PREDICT_ORACLE; ++kind) {
        std::vector<int> distance;
        for (const LayerPrefetch & it : prefetch) {
            distance.push_back(it.kind == kind ? it.distance : 0);
        }
        if (*std::max_element(distance.begin(), distance.end()) == 0) {
            continue;
        }
        auto predictor = make_predictor((pyorch_predictor) kind, model, distance);
        if (!predictor && maker) {
            predictor = maker((pyorch_predictor) kind, model, distance);
        }
        if (predictor) {
            stream.predictors.push_back({ (pyorch_predictor) kind, std::move(predictor) });
        }
    }
    return stream;
}

// One copy for all contexts, made when a predictor first applies the routers.
void PrefetchPlanner::copy_gates() {
    for (size_t layer = 0; (needs() & NEEDS_ROUTERS) && layer < model.routers.size(); ++layer) {
        const Router & router = model.routers[layer];
        if (router.gate != gates_of[layer]) {
            gates_of[layer] = router.gate;
            model.gates[layer] =
                router ? std::make_shared<const CompactMatrix>(router.gate, router.n_expert, router.n_embd) : nullptr;
        }
    }
}

void PrefetchPlanner::begin(const void * context, const IterationBegin & it) {
    Stream & stream = stream_of(context);
    stream.next.clear();
    std::vector<Forecast> forecasts;
    for (auto & [kind, predictor] : stream.predictors) {
        predictor->begin(it, forecasts);
    }
    plan(stream, context, -1, forecasts);
}

void PrefetchPlanner::routed(const void * context, const RoutedLayer & it) {
    Stream & stream = stream_of(context);
    auto &   open   = stream.open[it.layer];
    for (const ForecastExpert & guess : open) {
        const bool came_true = std::find(it.experts.begin(), it.experts.end(), guess.expert) != it.experts.end();
        precision_of(it.layer, guess).add(came_true);
    }
    open.clear();

    std::vector<Forecast> forecasts;
    for (auto & [kind, predictor] : stream.predictors) {
        if (it.decode || (needs_of(kind) & (NEEDS_PREFILL | NEEDS_ROUTERS)) || speculative) {
            predictor->routed(it, forecasts);
        }
    }
    stream.next.clear();
    stream.n_used = it.n_used;
    plan(stream, context, it.layer, forecasts);
}

std::vector<Forecast> PrefetchPlanner::next_forecasts(const void * context, int layer) const {
    const auto it = streams.find(context);
    if (it == streams.end() || it->second.next.empty() || it->second.next.front().layer != layer) {
        return {};
    }
    return it->second.next;
}

Rate & PrefetchPlanner::precision_of(int layer, const ForecastExpert & it) {
    return precision[layer][(size_t) (it.distance - 1) * model.n_expert[layer] + it.rank];
}

void PrefetchPlanner::plan(Stream & stream, const void * context, int from, std::vector<Forecast> & forecasts) {
    // What came of a guess of a layer that the context does not compute, would never be known.
    if (const auto computed = layers.find(context); computed != layers.end()) {
        const auto is_passed_over = [&](const Forecast & it) {
            return !std::binary_search(computed->second.begin(), computed->second.end(), it.layer);
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

// begin, end: forecasts of one layer, for the tokens of a ubatch. executed: the first n_used of each are what it
// computes.
void PrefetchPlanner::plan_layer(
    Stream & stream, const void * context, int from, const Forecast * begin, const Forecast * end, bool executed) {
    const int                   layer = begin->layer;
    std::vector<ForecastExpert> guesses;
    for (const Forecast * f = begin; f < end; ++f) {
        for (int rank = 0; rank < (int) f->experts.size(); ++rank) {
            guesses.push_back({ f->experts[rank], rank, f->distance });
        }
    }
    // Several tokens may want the same expert: its best rank counts.
    std::stable_sort(guesses.begin(), guesses.end(),
        [](const ForecastExpert & a, const ForecastExpert & b) { return a.rank < b.rank; });
    std::vector<uint8_t>        seen(model.n_expert[layer]);
    std::vector<ForecastExpert> each;
    std::vector<Table::Want>    wants;
    const double                limit = prefetch[layer].min_precision;
    const double                least = limit < 0 ? table.break_even() : limit;
    for (const ForecastExpert & it : guesses) {
        if (!seen[it.expert]) {
            seen[it.expert] = 1;
            const double p  = executed ? it.rank < stream.n_used : precision_of(layer, it).value();
            each.push_back(it);
            wants.push_back({ it.expert, p, executed ? p > 0 : p >= least, false });
        }
    }
    // Of several tokens together a forecast says less of what to keep than how often each expert was used.
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
