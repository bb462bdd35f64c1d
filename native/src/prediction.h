// Which experts the next layers will need, guessed from what is known when a layer was routed.
//
// A predictor sees every layer of a decoding ubatch and names experts of later layers, the likeliest
// first. It knows nothing of residency: what becomes of a prediction is the prefetcher's business.

#pragma once

#include "pyorch.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

// A layer of a decoding ubatch, just routed. Arrays are row-major by token.
struct RoutedLayer {
    int                  layer; // index into the layers with experts
    int                  n_tokens;
    int                  n_used;
    std::vector<int32_t> experts; // [n_tokens][n_used], the likeliest first
    std::vector<float>   weights; // [n_tokens][n_used] of their outputs

    // Empty where the predictor does not ask for them, or the graph does not have them.
    std::vector<float>   inputs;    // [n_tokens][n_embd] of the router
    std::vector<float>   residuals; // [n_tokens][n_embd] before the normalization that makes inputs of them
};

struct Prediction {
    int layer;
    int expert;
    int rank;     // among those predicted for this layer and token, 0 is the likeliest
    int distance; // layers ahead
};

// The weights with which a layer chooses its experts, where the model keeps them.
struct RouterWeights {
    const float * gate   = nullptr; // [n_expert][n_embd]
    const float * bias   = nullptr; // [n_expert] of the logits, or null
    const float * norm   = nullptr; // [n_embd] of the RMS normalization of the input, or null
    float         eps    = 0;       // of the same
    const float * choice = nullptr; // [n_expert] added to the probabilities for the choice only, or null
    bool          sigmoid = false;  // probabilities are sigmoids, not a softmax
    int           n_embd   = 0;
    int           n_expert = 0;

    explicit operator bool() const { return gate != nullptr; }
};

class Predictor {
public:
    virtual ~Predictor() = default;

    // Appends what later layers will need. Called for the layers of one sequence of ubatches in order.
    virtual void routed(const RoutedLayer & layer, std::vector<Prediction> & predictions) = 0;

};

// What a predictor wants to see of a layer, beside its experts and weights.
enum PredictorNeeds { NEEDS_NOTHING, NEEDS_INPUTS, NEEDS_RESIDUALS };

PredictorNeeds needs_of(pyorch_predictor kind);

// Of each layer [n_expert][n_embd]: the mean output of each expert. Empty where it is not known.
using DefaultVectors = std::vector<std::vector<float>>;

// routers: of all layers; entries may be empty. distance: layers ahead at most, at least 1. Null for PYORCH_PREDICT_NONE.
std::unique_ptr<Predictor> make_predictor(pyorch_predictor kind, const std::vector<RouterWeights> & routers,
                                          std::shared_ptr<const DefaultVectors> defaults,
                                          const std::vector<int> & n_expert, int distance);

} // namespace pyorch
