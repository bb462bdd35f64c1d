#include "prediction/predictors/predictors.h"

#include <cmath>

namespace pyorch {

static const float * row(const std::vector<float> & rows, int n_rows, int i, int n_columns) {
    return rows.size() == (size_t) n_rows * n_columns ? rows.data() + (size_t) i * n_columns : nullptr;
}

bool quasi_hidden_state(const RoutedLayer & it, int token, const Router & ahead, const DefaultVectors * defaults,
                        std::vector<float> & state) {
    const size_t  n_embd   = ahead.n_embd;
    const float * residual = row(it.residuals, it.n_tokens, token, ahead.n_embd);
    if (!residual || !ahead.norm) {
        const float * input = row(it.inputs, it.n_tokens, token, ahead.n_embd);
        if (input) {
            state.assign(input, input + n_embd);
        }
        return input != nullptr;
    }
    state.assign(residual, residual + n_embd);
    // As many as the layer has experts, each as wide as its residual.
    if (defaults && (*defaults)[it.layer].size() == ahead.n_expert * n_embd) {
        for (int s = 0; s < it.n_used; ++s) {
            const size_t  slot = (size_t) token * it.n_used + s;
            const float * d    = (*defaults)[it.layer].data() + it.computed[slot] * n_embd;
            for (size_t i = 0; i < n_embd; ++i) {
                state[i] += it.weights[slot] * d[i];
            }
        }
    }
    double squares = 0;
    for (float h : state) {
        squares += (double) h * h;
    }
    const float scale = (float) (1 / std::sqrt(squares / n_embd + ahead.eps));
    for (size_t i = 0; i < n_embd; ++i) {
        state[i] *= scale * ahead.norm[i];
    }
    return true;
}

Forecast forecast_of(const Router & router, const std::vector<float> & logits, int layer, int distance, int token) {
    Choice choice = choose(router, logits, 2 * router.n_used);
    return { layer, distance, token, std::move(choice.experts), std::move(choice.probability), std::move(choice.weights) };
}

namespace {

// The routers of the layers ahead, applied to a guess of their input: early for the far ones, better for the near.
class RouterAhead : public Predictor {
public:
    RouterAhead(const PredictionModel & model, const Distances & distance) :
        routers(model.routers), defaults(model.defaults), distance(distance) {}

    void routed(const RoutedLayer & it, std::vector<Forecast> & forecasts) override {
        for (int layer = it.layer + 1; layer < (int) routers.size(); ++layer) {
            const Router & router = routers[layer];
            if (layer - it.layer > distance[layer] || !router) {
                continue;
            }
            for (int t = 0; t < it.n_tokens && guess_input(it, t, router); ++t) {
                apply_router(router, input.data(), logits);
                forecasts.push_back(forecast_of(router, logits, layer, layer - it.layer, t));
            }
        }
    }

protected:
    const std::vector<Router>            routers;
    const std::shared_ptr<const DefaultVectors> defaults;
    std::vector<float>                          input;

    // The input of that router for token t. False where nothing is known of it.
    virtual bool guess_input(const RoutedLayer & it, int t, const Router & router) = 0;

private:
    const Distances    distance;
    std::vector<float> logits;
};

// This layer's router input: the residual stream changes slowly (Mixtral-Offloading).
class NextRouter : public RouterAhead {
    using RouterAhead::RouterAhead;

    bool guess_input(const RoutedLayer & it, int t, const Router & router) override {
        const float * own = row(it.inputs, it.n_tokens, t, router.n_embd);
        if (own) {
            input.assign(own, own + router.n_embd);
        }
        return own != nullptr;
    }
};

class QuasiHidden : public RouterAhead {
    using RouterAhead::RouterAhead;

    bool guess_input(const RoutedLayer & it, int t, const Router & router) override {
        return quasi_hidden_state(it, t, router, defaults.get(), input);
    }
};

} // namespace

std::unique_ptr<Predictor> make_next_router(const PredictionModel & model, const Distances & distance) {
    return std::make_unique<NextRouter>(model, distance);
}

std::unique_ptr<Predictor> make_quasi_hidden(const PredictionModel & model, const Distances & distance) {
    return std::make_unique<QuasiHidden>(model, distance);
}

} // namespace pyorch
