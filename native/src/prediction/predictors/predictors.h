// The predictors, one file each.

#pragma once

#include "prediction/prediction.h"

namespace pyorch {

using Distances = std::vector<int>; // by layer: how many layers ahead it is guessed at most; 0: it is not

std::unique_ptr<Predictor> make_quasi_hidden(const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_estimator(const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_hybrid(const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_expert_map(const PredictionModel & model, const Distances & distance);

} // namespace pyorch
