#include "replay/predictors/compared.h"

#include <algorithm>

namespace pyorch {

std::unique_ptr<Predictor> make_compared(
    pyorch_predictor kind, const PredictionModel & model, const std::vector<int> & distance) {
    switch (kind) {
    case PYORCH_PREDICT_PREVIOUS_TOKEN: return make_previous_token(model, distance);
    case PYORCH_PREDICT_LAYER_ALL: return make_layer_all(model, distance);
    case PYORCH_PREDICT_NEXT_ROUTER: return make_next_router(model, distance);
    case PYORCH_PREDICT_ACTIVATION_MATRIX: return make_activation_matrix(model, distance);
    default: return nullptr;
    }
}

int layers_ahead(const std::vector<int> & layers, int from, int to) {
    const auto a = std::lower_bound(layers.begin(), layers.end(), from);
    const auto b = std::lower_bound(layers.begin(), layers.end(), to);
    if (a == layers.end() || *a != from || b == layers.end() || *b != to) {
        return 0;
    }
    const int n = (int) layers.size();
    return ((int) (b - a) - 1 + n) % n + 1;
}

} // namespace pyorch
