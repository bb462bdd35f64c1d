// The gates (BuddyMoE, section 3.1), in the paper's order: whether absent experts of a token may be treated, and the
// limits of what a token may lose.

#pragma once

#include "pyorch.h"
#include "routing/routed_batch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pyorch {

// The weights of a token's experts before their normalization.
class RawWeights {
public:
    RawWeights(const RoutedBatch & batch, int t) :
            softmax(batch.softmax_selected), p(batch.probs + (size_t) t * batch.n_expert),
            offset(softmax ? *std::max_element(p, p + batch.n_expert) : 0) {}

    double of(int expert) const { return softmax ? std::exp(p[expert] - offset) : p[expert]; }

private:
    const bool    softmax; // of logits; the largest is subtracted, so that none overflows
    const float * p;
    const double  offset;
};

// The counter of the gate that refuses; null: no gate refuses.
using Refusal = uint64_t pyorch_substitution_counts::*;

// The experts that a batch computes with, each once: all, and the absent ones. Slots of ghosts request none.
struct Requested {
    int n        = 0;
    int n_absent = 0;
};
Requested count_requested(const RoutedBatch & batch, const uint8_t * resident);

// Whether gates depend on the router's certainty about a token's experts.
inline bool has_sensitivity_gates(const pyorch_substitution & settings) {
    return settings.tau > pyorch_default_substitution.tau || settings.gamma < pyorch_default_substitution.gamma;
}

class Gates {
public:
    // REQUIRES: some experts are absent
    Gates(const pyorch_substitution & settings, const RoutedBatch & batch, const Requested & requested);

    // Checks all absent slots of a token, which has these experts [n_used] before any replacement.
    Refusal refuses_token(int t, const int32_t * experts) const;

    // Checks one more slot. changed: changed slots of the token in this layer; earlier: in earlier layers.
    Refusal refuses_slot(int changed, int earlier) const;

private:
    const pyorch_substitution & settings;
    const RoutedBatch &         batch;
    const bool                  crowded;
};

} // namespace pyorch
