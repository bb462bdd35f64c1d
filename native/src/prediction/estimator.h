// The estimator: a small trained network that corrects the router logits of the next layer, which its router gives for
// a quasi-hidden state (Speculating Experts, section 6 and appendix A).
//
// It is linear to a latent vector, plus a learned vector of the layer, plus an MLP with SiLU, LayerNorm, and a linear
// head. It differs from the paper in two points: each layer has its own head, because expert e of one layer is
// unrelated to expert e of another; and the output of the head is added to the router's logits, so that the network
// need not learn the router too.

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

    // Corrects logits[inputs.size()][n_expert] of layer + 1, which its router gives for these states of n_embd values.
    // REQUIRES: 0 <= layer < n_layers.
    void correct(int layer, const std::vector<CompactVector> & states, float * logits) const;

private:
    const CompactMatrix      in_weight, up_weight, down_weight, head_weight;
    const std::vector<float> in_bias, position, up_bias, down_bias, norm_weight, norm_bias, head_bias;
};

} // namespace pyorch
