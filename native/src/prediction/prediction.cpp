#include "prediction/prediction.h"

#include "prediction/predictor_list.h"

#include <cmath>

namespace pyorch {

bool is_predicted(int n_tokens, int n_used, int n_expert) {
    static constexpr double STREAMED = 0.75;
    const double            unused   = std::pow(1 - (double) n_used / n_expert, n_tokens);
    return n_tokens == 1 || (n_tokens <= MAX_PREDICTED_TOKENS && 1 - unused < STREAMED);
}

unsigned needs_of(pyorch_predictor kind) { return predictor_list()[kind].sees; }

std::unique_ptr<Predictor> make_predictor(
    pyorch_predictor kind, const PredictionModel & model, const std::vector<int> & distance) {
    const auto make = predictor_list()[kind].make;
    return make ? make(model, distance) : nullptr;
}

} // namespace pyorch
