// Whether absent experts of a token may be treated at all, and how many (BuddyMoE, section 3.1): the gates, in the
// paper's order, and the limits on what a token may lose.

#pragma once

#include "pyorch.h"
#include "routing/routed_batch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pyorch {

// What a router makes the weights of a token's experts of, before they are normalized.
class RawWeights {
public:
    RawWeights(const RoutedBatch & batch, int t) :
            softmax(batch.softmax_selected), p(batch.probs + (size_t) t * batch.n_expert),
            offset(softmax ? *std::max_element(p, p + batch.n_expert) : 0) {}

    double of(int expert) const { return softmax ? std::exp(p[expert] - offset) : p[expert]; }

private:
    const bool    softmax; // of logits, from which the largest is subtracted, so that none overflows
    const float * p;
    const double  offset;
};

// The counter of what a gate refuses; null: it lets pass.
using Refusal = uint64_t pyorch_substitution_counts::*;

// Experts that a batch computes with, each once: all, and those that are absent. What ghosts compute asks for none.
struct Requested {
    int n        = 0;
    int n_absent = 0;
};
Requested count_requested(const RoutedBatch & batch, const uint8_t * resident);

// Whether it matters how certain the router is of a token's experts.
inline bool has_sensitivity_gates(const pyorch_substitution & settings) {
    return settings.tau > pyorch_default_substitution.tau || settings.gamma < pyorch_default_substitution.gamma;
}

class Gates {
public:
    // REQUIRES: some are absent
    Gates(const pyorch_substitution & settings, const RoutedBatch & batch, const Requested & requested);

    // Of all absent slots of a token, which computes with these experts [n_used] until something else is chosen.
    Refusal refuses_token(int t, const int32_t * experts) const;

    // Of one more slot. changed: slots of the token that were changed in this layer; earlier: in the layers before.
    Refusal refuses_slot(int changed, int earlier) const;

private:
    const pyorch_substitution & settings;
    const RoutedBatch &         batch;
    const bool                  crowded;
};

} // namespace pyorch
