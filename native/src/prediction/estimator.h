// A small trained network that knows how the router logits of the next layer differ from those that its router gives
// for a quasi-hidden state (Speculating Experts, section 6 and appendix A).
//
// Linear to a latent vector, plus what was learned about the layer, plus an MLP with SiLU, LayerNorm, and a linear
// head. As in the paper but for two things: each layer has a head of its own, since expert e of one layer has nothing
// to do with expert e of another; and the head's output is added to the router's logits, so that the network need
// not learn the router too.

#pragma once

#include "pyorch.h"

#include <vector>

namespace pyorch {

class Estimator {
public:
    // Copies the weights.
    explicit Estimator(const pyorch_estimator & weights);

    const int n_embd, n_latent, n_hidden, n_layers, n_expert;

    // What layer + 1 is known for: logits[n_expert] of its router for state[n_embd] become those of the estimate.
    // REQUIRES: 0 <= layer < n_layers.
    void correct(int layer, const float * state, float * logits) const;

private:
    const std::vector<float> in_weight, in_bias, position, up_weight, up_bias, down_weight, down_bias;
    const std::vector<float> norm_weight, norm_bias, head_weight, head_bias;
};

} // namespace pyorch
