#include "prediction/predictors/predictors.h"

#include "prediction/estimator.h"

namespace pyorch {
namespace {

// The quasi-hidden state and the router of the layer ahead, corrected by the estimator where that is the next layer
// and the estimator is to be asked about it.
class Estimated : public Predictor {
public:
    // asked: by layer that is guessed
    Estimated(const PredictionModel & model, std::vector<uint8_t> asked, const Distances & distance) :
        routers(model.routers), defaults(model.defaults), estimator(model.estimator), asked(std::move(asked)),
        distance(distance) {}

    void routed(const RoutedLayer & it, std::vector<Forecast> & forecasts) override {
        for (int layer = it.layer + 1; layer < (int) routers.size(); ++layer) {
            const Router & router = routers[layer];
            const int             ahead  = layer - it.layer;
            if (ahead > distance[layer] || !router) {
                continue;
            }
            const bool corrected = ahead == 1 && asked[layer] && it.layer < estimator->n_layers &&
                router.n_embd == estimator->n_embd;
            for (int t = 0; t < it.n_tokens && quasi_hidden_state(it, t, router, defaults.get(), state); ++t) {
                apply_router(router, state.data(), logits);
                if (corrected) {
                    estimator->correct(it.layer, state.data(), logits.data());
                }
                forecasts.push_back(forecast_of(router, logits, layer, ahead, t));
            }
        }
    }

private:
    const std::vector<Router>            routers;
    const std::shared_ptr<const DefaultVectors> defaults;
    const std::shared_ptr<const Estimator>      estimator;
    const std::vector<uint8_t>                  asked;
    const Distances                             distance;
    std::vector<float>                          state, logits;
};

} // namespace

std::unique_ptr<Predictor> make_estimator(const PredictionModel & model, const Distances & distance) {
    std::vector<uint8_t> asked(model.n_expert.size(), model.estimator != nullptr);
    return std::make_unique<Estimated>(model, std::move(asked), distance);
}

std::unique_ptr<Predictor> make_hybrid(const PredictionModel & model, const Distances & distance) {
    std::vector<uint8_t> asked = model.estimated;
    if (!model.estimator) {
        asked.clear();
    }
    asked.resize(model.n_expert.size());
    return std::make_unique<Estimated>(model, std::move(asked), distance);
}

} // namespace pyorch
