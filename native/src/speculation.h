// Speculative execution (Speculating Experts, section 4): a layer computes with the experts and weights that were
// forecast for it one layer earlier, in place of its router's. Lossy.

#pragma once

#include "prediction.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace pyorch {

// What the router of a layer decided, to be replaced. Arrays are row-major by token.
struct RouterChoice {
    int           n_tokens;
    int           n_expert;
    int           n_used;
    int32_t *     experts;    // [n_tokens][n_used], in and out
    float *       weights;    // [n_tokens][n_used], in and out
    const float * probs;      // [n_tokens][n_expert] after gating
    bool          normalized; // the weights of a token have a constant sum
};

class Speculation {
public:
    void set(pyorch_speculate mode) { this->mode = mode; }

    // Whether a ubatch is computed with forecasts. decode: one token of each sequence.
    bool active(bool decode) const { return mode == PYORCH_SPECULATE_ALL || (mode == PYORCH_SPECULATE_DECODE && decode); }
    bool on() const { return mode != PYORCH_SPECULATE_NONE; }

    // forecasts: of this layer, one for each token in their order; with any other number nothing is replaced, which
    // is true of the first layer too. Whether it was.
    bool apply(const RouterChoice & choice, const std::vector<Forecast> & forecasts);

    pyorch_speculation_counts counts() const;
    void reset_counts();

private:
    std::atomic<pyorch_speculate> mode{PYORCH_SPECULATE_NONE};
    mutable std::mutex            mutex;
    pyorch_speculation_counts     counted = {};
};

} // namespace pyorch
