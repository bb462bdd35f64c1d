#include "prediction/predictors/predictors.h"

#include <numeric>

namespace pyorch {
namespace {

// Every expert of a layer ahead.
class LayerAll : public Predictor {
public:
    LayerAll(const std::vector<int> & n_expert, const Distances & distance) : n_expert(n_expert), distance(distance) {}

    void routed(const RoutedLayer & it, std::vector<Forecast> & forecasts) override {
        const int n = (int) distance.size();
        for (int layer = 0; layer < n; ++layer) {
            if (distance[layer] > 0 && (it.layer + distance[layer]) % n == layer) {
                std::vector<int> all(n_expert[layer]);
                std::iota(all.begin(), all.end(), 0);
                forecasts.push_back({ layer, distance[layer], 0, std::move(all), {} });
            }
        }
    }

private:
    const std::vector<int> n_expert;
    const Distances        distance;
};

} // namespace

std::unique_ptr<Predictor> make_layer_all(const PredictionModel & model, const Distances & distance) {
    return std::make_unique<LayerAll>(model.n_expert, distance);
}

} // namespace pyorch
