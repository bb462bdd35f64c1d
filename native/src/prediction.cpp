#include "prediction.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace pyorch {
namespace {

// What the layer used for the previous token.
class PreviousToken : public Predictor {
public:
    PreviousToken(int n_layers, int distance) : distance(distance), used(n_layers), n_used(n_layers) {}

    void routed(const RoutedLayer & it, std::vector<Prediction> & predictions) override {
        used[it.layer]   = it.experts;
        n_used[it.layer] = it.n_used;
        const int layer = (it.layer + distance) % (int) used.size();
        for (size_t i = 0; i < used[layer].size(); ++i) {
            predictions.push_back({ layer, used[layer][i], (int) i % n_used[layer], distance });
        }
    }

private:
    const int                         distance;
    std::vector<std::vector<int32_t>> used;
    std::vector<int>                  n_used;
};

// Every expert of a layer ahead.
class LayerAll : public Predictor {
public:
    LayerAll(const std::vector<int> & n_expert, int distance) : n_expert(n_expert), distance(distance) {}

    void routed(const RoutedLayer & it, std::vector<Prediction> & predictions) override {
        const int layer = (it.layer + distance) % (int) n_expert.size();
        for (int e = 0; e < n_expert[layer]; ++e) {
            predictions.push_back({ layer, e, e, distance });
        }
    }

private:
    const std::vector<int> n_expert;
    const int              distance;
};

// The routers of the layers ahead, applied to a guess of their input: early for the far ones, better for the near.
class RouterAhead : public Predictor {
public:
    RouterAhead(const std::vector<RouterWeights> & routers, int distance) : routers(routers), distance(distance) {}

    void routed(const RoutedLayer & it, std::vector<Prediction> & predictions) override {
        for (int ahead = 1; ahead <= distance && it.layer + ahead < (int) routers.size(); ++ahead) {
            predict(it, ahead, predictions);
        }
    }

protected:
    // The input of that router for token t, or null.
    virtual const float * guess_input(const RoutedLayer & it, int t, const RouterWeights & router) = 0;

private:
    const std::vector<RouterWeights> routers;
    const int                        distance;
    std::vector<float>               scores;
    std::vector<int>                 order;

    void predict(const RoutedLayer & it, int ahead, std::vector<Prediction> & predictions) {
        const int             layer  = it.layer + ahead;
        const RouterWeights & router = routers[layer];
        for (int t = 0; t < it.n_tokens && router; ++t) {
            const float * input = guess_input(it, t, router);
            if (!input) {
                return;
            }
            score(router, input);
            // Beyond the experts of one token a guess is of little worth; its precision tells.
            const int n = std::min<int>(router.n_expert, 2 * it.n_used);
            order.resize(router.n_expert);
            std::iota(order.begin(), order.end(), 0);
            std::partial_sort(order.begin(), order.begin() + n, order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
            for (int r = 0; r < n; ++r) {
                predictions.push_back({ layer, order[r], r, ahead });
            }
        }
    }

    // In the order of the router's choice; only a bias of the choice makes probabilities necessary.
    void score(const RouterWeights & router, const float * input) {
        const auto dot = ggml_get_type_traits_cpu(GGML_TYPE_F32)->vec_dot;
        scores.resize(router.n_expert);
        for (int e = 0; e < router.n_expert; ++e) {
            dot(router.n_embd, &scores[e], 0, router.gate + (size_t) e * router.n_embd, 0, input, 0, 1);
            scores[e] += router.bias ? router.bias[e] : 0;
        }
        if (!router.choice) {
            return;
        }
        float sum = 0;
        const float most = *std::max_element(scores.begin(), scores.end());
        for (float & s : scores) {
            s = router.sigmoid ? 1 / (1 + std::exp(-s)) : std::exp(s - most);
            sum += s;
        }
        for (int e = 0; e < router.n_expert; ++e) {
            scores[e] = (router.sigmoid ? scores[e] : scores[e] / sum) + router.choice[e];
        }
    }
};

const float * row(const std::vector<float> & rows, int n_rows, int i, int n_columns) {
    return rows.size() == (size_t) n_rows * n_columns ? rows.data() + (size_t) i * n_columns : nullptr;
}

// This layer's router input: the residual stream changes slowly (Mixtral-Offloading).
class NextRouter : public RouterAhead {
    using RouterAhead::RouterAhead;

    const float * guess_input(const RoutedLayer & it, int t, const RouterWeights & router) override {
        return row(it.inputs, it.n_tokens, t, router.n_embd);
    }
};

// The quasi-hidden state (Speculating Experts, section 3.2): the residual after attention, plus what the selected
// experts give on average, normalized as the layer ahead does it. Without the residual: this layer's input.
class QuasiHidden : public RouterAhead {
public:
    QuasiHidden(const std::vector<RouterWeights> & routers, std::shared_ptr<const DefaultVectors> defaults, int distance) :
        RouterAhead(routers, distance), defaults(std::move(defaults)) {}

private:
    const std::shared_ptr<const DefaultVectors> defaults;
    std::vector<float>                          hidden;

    const float * guess_input(const RoutedLayer & it, int t, const RouterWeights & router) override {
        const size_t n_embd = router.n_embd;
        const float * residual = row(it.residuals, it.n_tokens, t, router.n_embd);
        if (!residual || !router.norm) {
            return row(it.inputs, it.n_tokens, t, router.n_embd);
        }
        hidden.assign(residual, residual + n_embd);
        if (defaults && !(*defaults)[it.layer].empty()) {
            for (int s = 0; s < it.n_used; ++s) {
                const size_t  slot = (size_t) t * it.n_used + s;
                const float * d    = (*defaults)[it.layer].data() + it.experts[slot] * n_embd;
                for (size_t i = 0; i < n_embd; ++i) {
                    hidden[i] += it.weights[slot] * d[i];
                }
            }
        }
        double squares = 0;
        for (float h : hidden) {
            squares += (double) h * h;
        }
        const float scale = (float) (1 / std::sqrt(squares / n_embd + router.eps));
        for (size_t i = 0; i < n_embd; ++i) {
            hidden[i] *= scale * router.norm[i];
        }
        return hidden.data();
    }
};

} // namespace

PredictorNeeds needs_of(pyorch_predictor kind) {
    return kind == PYORCH_PREDICT_NEXT_ROUTER ? NEEDS_INPUTS : kind == PYORCH_PREDICT_QUASI_HIDDEN ? NEEDS_RESIDUALS : NEEDS_NOTHING;
}

std::unique_ptr<Predictor> make_predictor(pyorch_predictor kind, const std::vector<RouterWeights> & routers,
                                          std::shared_ptr<const DefaultVectors> defaults,
                                          const std::vector<int> & n_expert, int distance) {
    switch (kind) {
        case PYORCH_PREDICT_PREVIOUS_TOKEN: return std::make_unique<PreviousToken>((int) n_expert.size(), distance);
        case PYORCH_PREDICT_LAYER_ALL:      return std::make_unique<LayerAll>(n_expert, distance);
        case PYORCH_PREDICT_NEXT_ROUTER:    return std::make_unique<NextRouter>(routers, distance);
        case PYORCH_PREDICT_QUASI_HIDDEN:   return std::make_unique<QuasiHidden>(routers, std::move(defaults), distance);
        default:                            return nullptr;
    }
}

} // namespace pyorch
