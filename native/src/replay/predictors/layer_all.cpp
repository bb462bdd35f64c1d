#include "replay/predictors/compared.h"

#include <numeric>

namespace pyorch {
namespace {

// Every expert of a layer ahead.
class LayerAll : public Predictor {
public:
    LayerAll(const PredictionModel & model, const std::vector<int> & distance) :
            layers(model.layers), n_expert(model.n_expert), distance(distance) {}

    void routed(const RoutedLayer & it, std::vector<Forecast> & forecasts) override {
        for (int layer : layers) {
            if (distance[layer] > 0 && layers_ahead(layers, it.layer, layer) == distance[layer]) {
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

} // namespace

std::unique_ptr<Predictor> make_layer_all(const PredictionModel & model, const std::vector<int> & distance) {
    return std::make_unique<LayerAll>(model, distance);
}

} // namespace pyorch
