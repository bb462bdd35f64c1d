// Predictors that exist to be compared with: replays have them, and engines that compute have not.

#pragma once

#include "prediction/prediction.h"

namespace pyorch {

// Null for a kind that is not one of them, or where the model lacks what it needs.
std::unique_ptr<Predictor> make_compared(
    pyorch_predictor kind, const PredictionModel & model, const std::vector<int> & distance);

std::unique_ptr<Predictor> make_previous_token(const PredictionModel & model, const std::vector<int> & distance);
std::unique_ptr<Predictor> make_layer_all(const PredictionModel & model, const std::vector<int> & distance);
std::unique_ptr<Predictor> make_next_router(const PredictionModel & model, const std::vector<int> & distance);
std::unique_ptr<Predictor> make_activation_matrix(const PredictionModel & model, const std::vector<int> & distance);

// How many layers after `from` comes `to`, of those in `layers`, or of the next token if it comes earlier: 1 to their
// number. 0 where one of them is not among them.
int layers_ahead(const std::vector<int> & layers, int from, int to);

} // namespace pyorch
