#include "prediction/prediction.h"

#include "prediction/predictors/predictors.h"

#include <algorithm>

namespace pyorch {

int layers_ahead(const std::vector<int> & layers, int from, int to) {
    const auto a = std::lower_bound(layers.begin(), layers.end(), from);
    const auto b = std::lower_bound(layers.begin(), layers.end(), to);
    if (a == layers.end() || *a != from || b == layers.end() || *b != to) {
        return 0;
    }
    const int n = (int) layers.size();
    return ((int) (b - a) - 1 + n) % n + 1;
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
