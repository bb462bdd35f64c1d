#include "prediction/prediction.h"

#include "prediction/predictors/predictors.h"

#include <algorithm>
#include <numeric>

namespace pyorch {

std::vector<int> top(const float * values, int n_values, int n) {
    std::vector<int> order(n_values);
    std::iota(order.begin(), order.end(), 0);
    n = std::min(n, n_values);
    std::partial_sort(order.begin(), order.begin() + n, order.end(), [&](int a, int b) {
        return values[a] != values[b] ? values[a] > values[b] : a < b;
    });
    order.resize(n);
    return order;
}

unsigned needs_of(pyorch_predictor kind) {
    switch (kind) {
        case PYORCH_PREDICT_NEXT_ROUTER:  return NEEDS_INPUTS | NEEDS_ROUTERS;
        case PYORCH_PREDICT_QUASI_HIDDEN:
        case PYORCH_PREDICT_ESTIMATOR:
        case PYORCH_PREDICT_HYBRID:       return NEEDS_RESIDUALS | NEEDS_ROUTERS;
        case PYORCH_PREDICT_ACTIVATION_MATRIX: return NEEDS_PREFILL;
        case PYORCH_PREDICT_EXPERT_MAP:   return NEEDS_PROBS | NEEDS_EMBEDDINGS;
        default:                          return NEEDS_NOTHING;
    }
}

std::unique_ptr<Predictor> make_predictor(pyorch_predictor kind, const PredictionModel & model, const std::vector<int> & distance) {
    switch (kind) {
        case PYORCH_PREDICT_PREVIOUS_TOKEN: return make_previous_token(model, distance);
        case PYORCH_PREDICT_LAYER_ALL:      return make_layer_all(model, distance);
        case PYORCH_PREDICT_NEXT_ROUTER:    return make_next_router(model, distance);
        case PYORCH_PREDICT_QUASI_HIDDEN:   return make_quasi_hidden(model, distance);
        case PYORCH_PREDICT_ESTIMATOR:      return make_estimator(model, distance);
        case PYORCH_PREDICT_HYBRID:         return make_hybrid(model, distance);
        case PYORCH_PREDICT_ACTIVATION_MATRIX: return make_activation_matrix(model, distance);
        case PYORCH_PREDICT_EXPERT_MAP:     return make_expert_map(model, distance);
        default:                            return nullptr;
    }
}

} // namespace pyorch
