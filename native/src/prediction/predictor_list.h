// The list of predictors: names, needs, and constructors.

#pragma once

#include "prediction/prediction.h"

namespace pyorch {

struct PredictorEntry {
    pyorch_predictor kind;
    const char *     name;
    unsigned         needs;      // PYORCH_NEEDS_*: if one is missing there are no forecasts
    unsigned         uses;       // PYORCH_NEEDS_*: optional data that make forecasts better
    bool             executable; // forecasts are distributions of the next layer's router
    const char *     description;

    // Null for a kind that predicts nothing, or that only a replay can make.
    std::unique_ptr<Predictor> (*make)(const PredictionModel & model, const std::vector<int> & distance);
};

// In the order of their kinds.
const std::vector<PredictorEntry> & predictor_list();

using Distances = std::vector<int>; // by layer: how many layers ahead it is predicted at most; 0: never

std::unique_ptr<Predictor> make_quasi_hidden(const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_hybrid(const PredictionModel & model, const Distances & distance);
std::unique_ptr<Predictor> make_expert_map(const PredictionModel & model, const Distances & distance);

} // namespace pyorch
