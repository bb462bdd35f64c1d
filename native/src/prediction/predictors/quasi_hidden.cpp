#include "prediction/estimator.h"
#include "prediction/predictor_list.h"

#include <algorithm>
#include <cmath>

namespace pyorch {
namespace {

const float * row(const std::vector<float> & rows, int n_rows, int i, int n_columns) {
    return rows.size() == (size_t) n_rows * n_columns ? rows.data() + (size_t) i * n_columns : nullptr;
}

// What is known, behind a layer, of the input of the routers ahead; of one token.
struct HiddenState {
    std::vector<float> residual; // empty where it is not known
    double             mean_square = 0;
    const float *      input       = nullptr; // of the layer's own router; null where it is not known
    int                n_embd      = 0;

    // Nothing where nothing fits that router.
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

// A forecast of logits, the 2 * n_used likeliest experts in it: beyond those of one token a guess is of little worth,
// and its precision tells.
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

// The routers of the layers ahead, applied to a guess of their input: early for the far ones, better for the near. The
// guess: the residual after attention, plus what the selected experts give on average, normalized as the router ahead
// has it (Speculating Experts, section 3.2). Where the residual or that norm is not known: the layer's own router
// input. Hybrid: corrected by the estimator where the layer ahead is the next one and that was found to be better.
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

    // Of the router of layer `to` for inputs that were guessed behind `from`: logits[inputs.size()][n_expert].
    void correct(int from, int to, const std::vector<CompactVector> & inputs, float * logits) const {
        const Router & router    = model.routers[to];
        const bool     is_better = model.estimated.empty() || model.estimated[to];
        if (estimator && to == from + 1 && is_better && from < estimator->n_layers &&
            router.n_embd == estimator->n_embd && router.n_expert == estimator->n_expert) {
            estimator->correct(from, inputs, logits);
        }
    }

    // Memory answers while the first of it is computed with.
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
