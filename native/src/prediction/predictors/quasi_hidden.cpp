#include "prediction/estimator.h"
#include "prediction/predictor_list.h"

#include <algorithm>
#include <cmath>

namespace pyorch {
namespace {

const float * row(const std::vector<float> & rows, int n_rows, int i, int n_columns) {
    return rows.size() == (size_t) n_rows * n_columns ? rows.data() + (size_t) i * n_columns : nullptr;
}

// The state after a layer from which the inputs of later routers are estimated; for one token.
struct HiddenState {
    std::vector<float> residual; // empty if unknown
    double             mean_square = 0;
    const float *      input       = nullptr; // of the layer's own router; null if unknown
    int                n_embd      = 0;

    // Returns the estimated input, or an empty one if nothing fits that router.
    std::vector<float> input_of(const Router & ahead) const {
        if (ahead.n_embd != n_embd) {
            return {};
        }
        if (residual.empty() || !ahead.norm) {
            return input ? std::vector<float>(input, input + n_embd) : std::vector<float>();
        }
        const float        scale = (float) (1 / std::sqrt(mean_square + ahead.eps));
        std::vector<float> to(n_embd);
        for (int i = 0; i < n_embd; ++i) {
            to[i] = residual[i] * (scale * ahead.norm[i]);
        }
        return to;
    }
};

// Forecasts from logits the 2 * n_used likeliest experts. Guesses beyond a token's n_used are worth little, and their
// measured precision shows that.
Forecast forecast_of(const Router & router, const float * logits, int layer, int distance, int token) {
    Choice choice = choose(router, std::vector<float>(logits, logits + router.n_expert), 2 * router.n_used);
    return {
        layer,
        distance,
        token,
        std::move(choice.experts),
        std::move(choice.probability),
        std::move(choice.weights),
    };
}

// Applies the routers of later layers to an estimate of their input: early for far layers, better for near ones. The
// estimate is the residual after attention plus the mean output of the selected experts, normalized as the later router
// does (Speculating Experts, section 3.2). If the residual or that norm is unknown, it is the layer's own router input.
// Hybrid: the estimator corrects the forecast of the next layer, if it was measured to be better.
class QuasiHidden : public Predictor {
public:
    QuasiHidden(const PredictionModel & model, const Distances & distance, bool hybrid) :
            model(model), distance(distance), estimator(hybrid ? model.estimator : nullptr) {}

    void routed(const RoutedLayer & routed_layer, std::vector<Forecast> & forecasts) override {
        std::vector<int> reached;
        for (int layer = routed_layer.layer + 1; layer < (int) model.routers.size(); ++layer) {
            if (layer - routed_layer.layer <= distance[layer] && model.routers[layer]) {
                reached.push_back(layer);
            }
        }
        if (reached.empty()) {
            return;
        }
        prefetch_what_is_read(routed_layer, reached);
        const std::vector<HiddenState> states = states_of(routed_layer);
        for (int layer : reached) {
            const Router &             router = model.routers[layer];
            const int                  ahead  = layer - routed_layer.layer;
            std::vector<CompactVector> inputs;
            for (const HiddenState & state : states) {
                const std::vector<float> input = state.input_of(router);
                if (!input.empty()) {
                    inputs.emplace_back(input.data(), router.n_embd);
                }
            }
            if (inputs.size() != states.size()) {
                continue;
            }
            const size_t       n_expert = router.n_expert;
            std::vector<float> logits(inputs.size() * n_expert);
            for (size_t i = 0; router.bias && i < logits.size(); ++i) {
                logits[i] = router.bias[i % n_expert];
            }
            model.gates[layer]->multiply(inputs, 0, n_expert, logits.data());
            correct(routed_layer.layer, layer, inputs, logits.data());
            for (size_t t = 0; t < inputs.size(); ++t) {
                forecasts.push_back(forecast_of(router, logits.data() + t * n_expert, layer, ahead, (int) t));
            }
        }
    }

private:
    const PredictionModel                  model;
    const Distances                        distance;
    const std::shared_ptr<const Estimator> estimator;

    // Corrects logits[inputs.size()][n_expert] of layer `to`, for inputs estimated after layer `from`.
    void correct(int from, int to, const std::vector<CompactVector> & inputs, float * logits) const {
        const Router & router    = model.routers[to];
        const bool     is_better = model.estimated.empty() || model.estimated[to];
        if (estimator && to == from + 1 && is_better && from < estimator->n_layers &&
            router.n_embd == estimator->n_embd && router.n_expert == estimator->n_expert) {
            estimator->correct(from, inputs, logits);
        }
    }

    // Fetches memory that is read soon, while the first part is being computed.
    void prefetch_what_is_read(const RoutedLayer & routed_layer, const std::vector<int> & reached) const {
        const CompactMatrix * defaults = model.defaults[routed_layer.layer].get();
        for (size_t slot = 0; defaults && slot < routed_layer.computed.size(); ++slot) {
            defaults->prefetch(routed_layer.computed[slot], 1);
        }
        for (int layer : reached) {
            if (const Router & router = model.routers[layer]; router.norm) {
                prefetch(router.norm, router.n_embd * sizeof(float));
            }
        }
        model.gates[reached.front()]->prefetch(0, 1);
    }

    std::vector<HiddenState> states_of(const RoutedLayer & routed_layer) const { // by token
        std::vector<HiddenState> states(routed_layer.n_tokens);
        const int                n_embd =
            (int) std::max(routed_layer.residuals.size(), routed_layer.inputs.size()) / routed_layer.n_tokens;
        const CompactMatrix * defaults = model.defaults[routed_layer.layer].get();
        for (int t = 0; t < routed_layer.n_tokens; ++t) {
            HiddenState & state    = states[t];
            state.n_embd           = n_embd;
            state.input            = row(routed_layer.inputs, routed_layer.n_tokens, t, n_embd);
            const float * residual = row(routed_layer.residuals, routed_layer.n_tokens, t, n_embd);
            if (!residual) {
                continue;
            }
            state.residual.assign(residual, residual + n_embd);
            for (int s = 0; s < routed_layer.n_used && defaults && defaults->n_columns() == n_embd; ++s) {
                const size_t slot = (size_t) t * routed_layer.n_used + s;
                defaults->add_rows(
                    routed_layer.computed[slot], 1, &routed_layer.weights[slot], { state.residual.data() });
            }
            state.mean_square = dot(state.residual.data(), state.residual.data(), n_embd) / n_embd;
        }
        return states;
    }
};

} // namespace

std::unique_ptr<Predictor> make_quasi_hidden(const PredictionModel & model, const Distances & distance) {
    return std::make_unique<QuasiHidden>(model, distance, false);
}

std::unique_ptr<Predictor> make_hybrid(const PredictionModel & model, const Distances & distance) {
    return std::make_unique<QuasiHidden>(model, distance, true);
}

} // namespace pyorch
