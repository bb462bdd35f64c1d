// The predictors, one file each.

#pragma once

#include "prediction/prediction.h"

namespace pyorch {

using Distances = std::vector<int>; // by layer: how many layers ahead it is guessed at most; 0: it is not

std::unique_ptr<Predictor> make_previous_token(const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_layer_all     (const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_next_router   (const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_quasi_hidden  (const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_estimator     (const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_hybrid        (const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_expert_map    (const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_activation_matrix(const PredictionModel & model, const Distances & distance);

// The quasi-hidden state (Speculating Experts, section 3.2): the residual after attention, plus what the selected
// experts give on average, normalized as `ahead`, the router of a later layer, has it. Where the residual or that norm
// is not known: the layer's own router input. state: [n_embd]. False where neither is known.
bool quasi_hidden_state(const RoutedLayer & it, int token, const Router & ahead, const DefaultVectors * defaults,
                        std::vector<float> & state);

// A forecast of logits, the 2 * n_used likeliest experts in it: beyond those of one token a guess is of little worth,
// and its precision tells.
Forecast forecast_of(const Router & router, const std::vector<float> & logits, int layer, int distance, int token);

} // namespace pyorch
