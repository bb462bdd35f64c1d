// A small trained network that knows how the router logits of the next layer differ from those that its router gives
// for a quasi-hidden state (Speculating Experts, section 6 and appendix A).
//
// Linear to a latent vector, plus what was learned about the layer, plus an MLP with SiLU, LayerNorm, and a linear
// head. As in the paper but for two things: each layer has a head of its own, since expert e of one layer has nothing
// to do with expert e of another; and the head's output is added to the router's logits, so that the network need
// not learn the router too.

#pragma once

#include "prediction/compact_matrix.h"
#include "pyorch.h"

#include <vector>

namespace pyorch {

class Estimator {
public:
    // Copies the weights.
    explicit Estimator(const pyorch_estimator & weights);

    const int n_embd, n_latent, n_hidden, n_layers, n_expert;

    // The estimate of layer + 1: corrects logits[inputs.size()][n_expert], which its router gives for these states of
    // n_embd values. REQUIRES: 0 <= layer < n_layers.
    void correct(int layer, const std::vector<CompactVector> & states, float * logits) const;

private:
    const CompactMatrix      in_weight, up_weight, down_weight, head_weight;
    const std::vector<float> in_bias, position, up_bias, down_bias, norm_weight, norm_bias, head_bias;
};

} // namespace pyorch
