#include "prediction/prediction.h"

#include "prediction/predictor_list.h"

#include <algorithm>
#include <cmath>

namespace pyorch {

bool is_predicted(int n_tokens, int n_used, int n_expert) {
    static constexpr double STREAMED = 0.75;
    const double            unused   = std::pow(1 - (double) n_used / n_expert, n_tokens);
    return n_tokens == 1 || (n_tokens <= MAX_PREDICTED_TOKENS && 1 - unused < STREAMED);
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

unsigned needs_of(pyorch_predictor kind) { return predictor_list()[kind].sees; }

std::unique_ptr<Predictor> make_predictor(
    pyorch_predictor kind, const PredictionModel & model, const std::vector<int> & distance) {
    const auto make = predictor_list()[kind].make;
    return make ? make(model, distance) : nullptr;
}

} // namespace pyorch
