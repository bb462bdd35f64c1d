// Which experts the next layers will need, predicted from what is known when a layer was routed.
//
// A predictor sees every layer of a narrow ubatch and makes forecasts of later layers. It knows nothing
// of residency: which experts of a forecast become guesses, to be read ahead, is the prefetch planner's business.

#pragma once

#include "prediction/compact_matrix.h"
#include "prediction/router.h"
#include "pyorch.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

// Nothing is forecast for wider ubatches: what they use is a scan to the residency table (Demand::scans), and guesses
// in between would take the place of what decoding needs: decoding 8 requests together was a quarter slower with them.
constexpr int MAX_PREDICTED_TOKENS = 7;

// Whether a ubatch, of a prompt or of one token of each sequence, is narrow enough for forecasts of its layers: where
// it needs three quarters of a layer's experts, if they are used alike, whole layers are read ahead (see
// Table::acquire).
bool is_predicted(int n_tokens, int n_used, int n_expert);

// A ubatch begins. Each of its tokens is one iteration of one sequence.
struct IterationBegin {
    bool               decode; // one token of each sequence
    int                n_tokens;
    std::vector<float> embeddings; // [n_tokens][n_embd] of the embedding layer, or empty
};

// A layer of a ubatch, just routed. Arrays are row-major by token.
struct RoutedLayer {
    int                  layer; // index into the layers with experts
    int                  n_tokens;
    int                  n_used;
    bool                 decode;  // one token of each sequence
    std::vector<int32_t> experts; // [n_tokens][n_used] that the router asked for, the likeliest first

    // What is computed, which others may stand in for.
    std::vector<int32_t> computed; // [n_tokens][n_used]
    std::vector<float>   weights;  // [n_tokens][n_used] of their outputs

    // Empty where the predictor does not ask for them, or the graph does not have them.
    std::vector<float> probs;     // [n_tokens][n_expert] with the sum 1
    std::vector<float> inputs;    // [n_tokens][n_embd] of the router
    std::vector<float> residuals; // [n_tokens][n_embd] before the normalization that makes inputs of them
};

// What one layer will need for one token.
struct Forecast {
    int                layer;
    int                distance;    // layers ahead of the last one that was routed
    int                token;       // of the ubatch
    std::vector<int>   experts;     // worth reading, the likeliest first
    std::vector<float> probability; // [n_expert] with the sum 1, empty where the predictor has none
    std::vector<float> weights;     // of the outputs of the first n_used, empty where the predictor applies no router
};

class Predictor {
public:
    virtual ~Predictor() = default;

    // Both append what later layers will need. Called for the ubatches of one context in order, and for their layers.
    virtual void begin(const IterationBegin &, std::vector<Forecast> &) {}
    virtual void routed(const RoutedLayer & layer, std::vector<Forecast> & forecasts) = 0;
};

// PYORCH_NEEDS_*: what a predictor works with, and so what it is shown of a layer beside its experts and weights. One
// that knows the future is shown layers of prompts, too.
unsigned needs_of(pyorch_predictor kind);

// By layer, null where they are not known.
using CompactMatrices = std::vector<std::shared_ptr<const CompactMatrix>>;

class Estimator;
class ExpertMapStore;

// What predictors are made of; all shared, none changes once it is here.
struct PredictionModel {
    std::vector<int>                 n_expert; // by layer
    std::vector<Router>              routers;  // by layer, entries may be empty
    CompactMatrices                  gates;    // [n_expert][n_embd] of routers, for predictors that apply them
    CompactMatrices                  defaults; // [n_expert][n_embd] the mean output of each expert
    std::shared_ptr<const Estimator> estimator;
    std::vector<uint8_t>             estimated; // by layer: hybrid takes the estimator; empty: for all
    std::shared_ptr<ExpertMapStore>  maps;      // of past iterations; this one grows
};

// distance: by layer, how many layers ahead it is guessed at most; 0: it is not. Null for a kind that predicts nothing,
// or that only a replay can make.
std::unique_ptr<Predictor> make_predictor(
    pyorch_predictor kind, const PredictionModel & model, const std::vector<int> & distance);

} // namespace pyorch
