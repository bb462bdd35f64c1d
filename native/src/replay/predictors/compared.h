// Predictors that exist to be compared with: replays have them, and engines that compute have not.

#pragma once

#include "prediction/prediction.h"

namespace pyorch {

// Null for a kind that is not one of them, or where the model lacks what it needs.
std::unique_ptr<Predictor> make_compared(
    pyorch_predictor kind, const PredictionModel & model, const std::vector<int> & distance);

std::unique_ptr<Predictor> make_activation_matrix(const PredictionModel & model, const std::vector<int> & distance);

} // namespace pyorch
