// Prediction of the experts of the next layers, after a layer was routed.
//
// A predictor sees every layer of a narrow ubatch and makes forecasts of later layers. It does not know residency: the
// prefetch planner decides which experts of a forecast become guesses.

#pragma once

#include "prediction/compact_matrix.h"
#include "prediction/router.h"
#include "pyorch.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

// Wider ubatches get no forecasts. Their uses are a scan for the residency table (Demand::scans), and guesses in
// between would displace the experts that decoding needs: decoding 8 requests together was a quarter slower with
// guesses.
constexpr int MAX_PREDICTED_TOKENS = 7;

// Whether a ubatch, of a prompt or of one token of each sequence, is narrow enough for forecasts. If it needs three
// quarters of a layer's experts, assuming equal use, whole layers are prefetched (see Table::acquire).
bool is_predicted(int n_tokens, int n_used, int n_expert);

// The beginning of a ubatch. Each of its tokens is one iteration of one sequence.
struct IterationBegin {
    bool               decode; // one token of each sequence
    int                n_tokens;
    std::vector<float> embeddings; // [n_tokens][n_embd] of the embedding layer, or empty
};

// A layer of a ubatch after its routing. Arrays are row-major by token.
struct RoutedLayer {
    int                  layer; // index into the layers with experts
    int                  n_tokens;
    int                  n_used;
    bool                 decode;  // one token of each sequence
    std::vector<int32_t> experts; // [n_tokens][n_used] the router's choice, the likeliest first

    // The computed experts, which may differ from the router's choice.
    std::vector<int32_t> computed; // [n_tokens][n_used]
    std::vector<float>   weights;  // [n_tokens][n_used] of their outputs

    // Empty if the predictor does not need them, or the graph does not have them.
    std::vector<float> probs;     // [n_tokens][n_expert] with the sum 1
    std::vector<float> inputs;    // [n_tokens][n_embd] of the router
    std::vector<float> residuals; // [n_tokens][n_embd] the inputs before their normalization
};

// The predicted experts of one layer for one token.
struct Forecast {
    int                layer;
    int                distance;    // layers after the last routed one
    int                token;       // of the ubatch
    std::vector<int>   experts;     // worth prefetching, the likeliest first
    std::vector<float> probability; // [n_expert] with the sum 1, empty if the predictor has none
    std::vector<float> weights;     // of the outputs of the first n_used, empty if the predictor applies no router
};

class Predictor {
public:
    virtual ~Predictor() = default;

    // Both append forecasts. Called for the ubatches of one context in order, and for their layers.
    virtual void begin(const IterationBegin &, std::vector<Forecast> &) {}
    virtual void routed(const RoutedLayer & layer, std::vector<Forecast> & forecasts) = 0;
};

// Returns PYORCH_NEEDS_*: the data that a predictor needs of a layer in addition to its experts and weights. A
// predictor that knows the future also sees layers of prompts.
unsigned needs_of(pyorch_predictor kind);

// By layer; null for an unknown one.
using CompactMatrices = std::vector<std::shared_ptr<const CompactMatrix>>;

class Estimator;
class ExpertMapStore;

// The shared inputs of predictors. None of them changes while it is in here.
struct PredictionModel {
    std::vector<int>                 n_expert; // by layer
    std::vector<Router>              routers;  // by layer, entries may be empty
    CompactMatrices                  gates;    // [n_expert][n_embd] of routers, for predictors that apply them
    CompactMatrices                  defaults; // [n_expert][n_embd] the mean output of each expert
    std::shared_ptr<const Estimator> estimator;
    std::vector<uint8_t>             estimated; // by layer: hybrid uses the estimator; empty: for all
    std::shared_ptr<ExpertMapStore>  maps;      // of past iterations; the store grows
};

// Makes a predictor. distance: by layer, how many layers ahead it is predicted at most; 0: never. Returns null for a
// kind that predicts nothing, or that only a replay can make.
std::unique_ptr<Predictor> make_predictor(
    pyorch_predictor kind, const PredictionModel & model, const std::vector<int> & distance);

} // namespace pyorch
