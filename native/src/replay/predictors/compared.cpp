#include "replay/predictors/compared.h"

#include <algorithm>
#include <numeric>

namespace pyorch {
namespace {

// How many layers after `from` comes `to`, of those in `layers`, or of the next token if it comes earlier: 1 to their
// number. 0 where one of them is not among them.
int layers_ahead(const std::vector<int> & layers, int from, int to) {
    const auto a = std::lower_bound(layers.begin(), layers.end(), from);
    const auto b = std::lower_bound(layers.begin(), layers.end(), to);
    if (a == layers.end() || *a != from || b == layers.end() || *b != to) {
        return 0;
    }
    const int n = (int) layers.size();
    return ((int) (b - a) - 1 + n) % n + 1;
}

// What the layer used for the previous token.
class PreviousToken : public Predictor {
public:
    PreviousToken(const PredictionModel & model, const std::vector<int> & distance) :
            layers(model.layers), distance(distance), last(distance.size()) {}

    void routed(const RoutedLayer & routed_layer, std::vector<Forecast> & forecasts) override {
        last[routed_layer.layer] = routed_layer;
        for (int layer : layers) {
            if (distance[layer] == 0 || layers_ahead(layers, routed_layer.layer, layer) != distance[layer]) {
                continue;
            }
            const RoutedLayer & was = last[layer];
            for (int t = 0; t < (was.experts.empty() ? 0 : was.n_tokens); ++t) {
                const auto first = was.experts.begin() + (size_t) t * was.n_used;
                forecasts.push_back({ layer, distance[layer], t, std::vector<int>(first, first + was.n_used), {}, {} });
            }
        }
    }

private:
    const std::vector<int>   layers;
    const std::vector<int>   distance;
    std::vector<RoutedLayer> last;
};

// Every expert of a layer ahead.
class LayerAll : public Predictor {
public:
    LayerAll(const PredictionModel & model, const std::vector<int> & distance) :
            layers(model.layers), n_expert(model.n_expert), distance(distance) {}

    void routed(const RoutedLayer & routed_layer, std::vector<Forecast> & forecasts) override {
        for (int layer : layers) {
            if (distance[layer] > 0 && layers_ahead(layers, routed_layer.layer, layer) == distance[layer]) {
                std::vector<int> all(n_expert[layer]);
                std::iota(all.begin(), all.end(), 0);
                forecasts.push_back({ layer, distance[layer], 0, std::move(all), {}, {} });
            }
        }
    }

private:
    const std::vector<int> layers;
    const std::vector<int> n_expert;
    const std::vector<int> distance;
};

// The routers of the layers ahead, applied to this layer's router input: the residual stream changes slowly
// (Mixtral-Offloading). So quasi-hidden does where it knows no residual.
class NextRouter : public Predictor {
public:
    NextRouter(const PredictionModel & model, const std::vector<int> & distance) :
            routers(make_predictor(PYORCH_PREDICT_QUASI_HIDDEN, model, distance)) {}

    void routed(const RoutedLayer & layer, std::vector<Forecast> & forecasts) override {
        RoutedLayer inputs_only = layer;
        inputs_only.residuals.clear();
        routers->routed(inputs_only, forecasts);
    }

private:
    const std::unique_ptr<Predictor> routers;
};

} // namespace

std::unique_ptr<Predictor> make_compared(
    pyorch_predictor kind, const PredictionModel & model, const std::vector<int> & distance) {
    switch (kind) {
    case PYORCH_PREDICT_PREVIOUS_TOKEN: return std::make_unique<PreviousToken>(model, distance);
    case PYORCH_PREDICT_LAYER_ALL: return std::make_unique<LayerAll>(model, distance);
    case PYORCH_PREDICT_NEXT_ROUTER: return std::make_unique<NextRouter>(model, distance);
    case PYORCH_PREDICT_ACTIVATION_MATRIX: return make_activation_matrix(model, distance);
    default: return nullptr;
    }
}

} // namespace pyorch
