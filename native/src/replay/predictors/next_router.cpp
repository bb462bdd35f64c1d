#include "replay/predictors/compared.h"

namespace pyorch {
namespace {

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

std::unique_ptr<Predictor> make_next_router(const PredictionModel & model, const std::vector<int> & distance) {
    return std::make_unique<NextRouter>(model, distance);
}

} // namespace pyorch
