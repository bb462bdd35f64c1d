#include "replay/predictors/compared.h"

namespace pyorch {
namespace {

// What the layer used for the previous token.
class PreviousToken : public Predictor {
public:
    PreviousToken(const PredictionModel & model, const std::vector<int> & distance) :
            layers(model.layers), distance(distance), last(distance.size()) {}

    void routed(const RoutedLayer & it, std::vector<Forecast> & forecasts) override {
        last[it.layer] = it;
        for (int layer : layers) {
            if (distance[layer] == 0 || layers_ahead(layers, it.layer, layer) != distance[layer]) {
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

} // namespace

std::unique_ptr<Predictor> make_previous_token(const PredictionModel & model, const std::vector<int> & distance) {
    return std::make_unique<PreviousToken>(model, distance);
}

} // namespace pyorch
