#include "prediction/predictors/predictors.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>

namespace pyorch {

static const float * row(const std::vector<float> & rows, int n_rows, int i, int n_columns) {
    return rows.size() == (size_t) n_rows * n_columns ? rows.data() + (size_t) i * n_columns : nullptr;
}

bool quasi_hidden_state(const RoutedLayer & it, int token, const RouterWeights & ahead, const DefaultVectors * defaults,
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
    if (defaults && !(*defaults)[it.layer].empty()) {
        for (int s = 0; s < it.n_used; ++s) {
            const size_t  slot = (size_t) token * it.n_used + s;
            const float * d    = (*defaults)[it.layer].data() + it.experts[slot] * n_embd;
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

void route(const RouterWeights & router, const float * input, std::vector<float> & logits) {
    const auto dot = ggml_get_type_traits_cpu(GGML_TYPE_F32)->vec_dot;
    logits.resize(router.n_expert);
    for (int e = 0; e < router.n_expert; ++e) {
        dot(router.n_embd, &logits[e], 0, router.gate + (size_t) e * router.n_embd, 0, input, 0, 1);
        logits[e] += router.bias ? router.bias[e] : 0;
    }
}

Forecast forecast_of(const RouterWeights & router, const std::vector<float> & logits, int layer, int distance, int token, int n_used) {
    Forecast f = { layer, distance, token, {}, logits };
    float sum = 0;
    const float most = *std::max_element(logits.begin(), logits.end());
    for (float & p : f.probability) {
        p = router.sigmoid ? 1 / (1 + std::exp(-p)) : std::exp(p - most);
        sum += p;
    }
    std::vector<float> choice = f.probability;
    for (size_t e = 0; e < choice.size(); ++e) {
        f.probability[e] /= sum;
        choice[e] = router.choice ? (router.sigmoid ? choice[e] : f.probability[e]) + router.choice[e] : logits[e];
    }
    f.experts = top(choice.data(), (int) choice.size(), 2 * n_used);
    return f;
}

namespace {

// The routers of the layers ahead, applied to a guess of their input: early for the far ones, better for the near.
class RouterAhead : public Predictor {
public:
    RouterAhead(const PredictionModel & model, const Distances & distance) :
        routers(model.routers), defaults(model.defaults), distance(distance) {}

    void routed(const RoutedLayer & it, std::vector<Forecast> & forecasts) override {
        for (int layer = it.layer + 1; layer < (int) routers.size(); ++layer) {
            const RouterWeights & router = routers[layer];
            if (layer - it.layer > distance[layer] || !router) {
                continue;
            }
            for (int t = 0; t < it.n_tokens && guess_input(it, t, router); ++t) {
                route(router, input.data(), logits);
                forecasts.push_back(forecast_of(router, logits, layer, layer - it.layer, t, it.n_used));
            }
        }
    }

protected:
    const std::vector<RouterWeights>            routers;
    const std::shared_ptr<const DefaultVectors> defaults;
    std::vector<float>                          input;

    // The input of that router for token t. False where nothing is known of it.
    virtual bool guess_input(const RoutedLayer & it, int t, const RouterWeights & router) = 0;

private:
    const Distances    distance;
    std::vector<float> logits;
};

// This layer's router input: the residual stream changes slowly (Mixtral-Offloading).
class NextRouter : public RouterAhead {
    using RouterAhead::RouterAhead;

    bool guess_input(const RoutedLayer & it, int t, const RouterWeights & router) override {
        const float * own = row(it.inputs, it.n_tokens, t, router.n_embd);
        if (own) {
            input.assign(own, own + router.n_embd);
        }
        return own != nullptr;
    }
};

class QuasiHidden : public RouterAhead {
    using RouterAhead::RouterAhead;

    bool guess_input(const RoutedLayer & it, int t, const RouterWeights & router) override {
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
