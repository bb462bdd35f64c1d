#include "prediction/predictor_list.h"

#include "prediction/prediction.h"

#include <cmath>

namespace pyorch {

static constexpr unsigned BY_ROUTERS = PYORCH_NEEDS_ROUTERS | PYORCH_NEEDS_STATES;

const std::vector<PredictorEntry> & predictor_list() {
    static const std::vector<PredictorEntry> list = {
        { PYORCH_PREDICT_NONE, "none", 0, 0, false, "reads nothing ahead", nullptr },
        { PYORCH_PREDICT_QUASI_HIDDEN, "quasi-hidden", BY_ROUTERS, PYORCH_NEEDS_DEFAULT_VECTORS, true,
            "the layer's router, applied to what an earlier layer's experts make of its input on average",
            make_quasi_hidden },
        { PYORCH_PREDICT_HYBRID, "hybrid", BY_ROUTERS | PYORCH_NEEDS_ESTIMATOR, PYORCH_NEEDS_DEFAULT_VECTORS, true,
            "quasi-hidden, corrected by a trained network for the next layer where that is better", make_hybrid },
        { PYORCH_PREDICT_EXPERT_MAP, "expert-map", PYORCH_NEEDS_HISTORY | PYORCH_NEEDS_DISTRIBUTIONS,
            PYORCH_NEEDS_EMBEDDINGS, false, "what the most alike past iteration used in the layer", make_expert_map },
        { PYORCH_PREDICT_ORACLE, "oracle", PYORCH_NEEDS_FUTURE, 0, false, "the experts that the layer will use",
            nullptr },
    };
    return list;
}

bool is_predicted(int n_tokens, int n_used, int n_expert) {
    static constexpr double STREAMED = 0.75;
    const double            unused   = std::pow(1 - (double) n_used / n_expert, n_tokens);
    return n_tokens == 1 || (n_tokens <= MAX_PREDICTED_TOKENS && 1 - unused < STREAMED);
}

unsigned needs_of(pyorch_predictor kind) { return predictor_list()[kind].needs | predictor_list()[kind].uses; }

std::unique_ptr<Predictor> make_predictor(
    pyorch_predictor kind, const PredictionModel & model, const std::vector<int> & distance) {
    const auto make = predictor_list()[kind].make;
    return make ? make(model, distance) : nullptr;
}

} // namespace pyorch
