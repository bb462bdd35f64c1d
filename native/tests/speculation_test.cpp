// Weights of speculative execution: a forecast that equals the router's own distribution changes nothing.

#include "routing/speculation.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

using namespace pyorch;

static void require(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

// How a model makes weights of what its router gives: for each of the layouts that occur.
enum Gating { SOFTMAX, SOFTMAX_NORMALIZED, SIGMOID, SIGMOID_NORMALIZED, SOFTMAX_OF_SELECTED };

int main() {
    constexpr int   n_expert = 5, n_used = 2;
    constexpr float scale    = 2.5f; // some models multiply their weights
    const float     logits[n_expert] = { 0.3f, 1.7f, -0.4f, 0.9f, -2.0f };

    for (Gating gating : { SOFTMAX, SOFTMAX_NORMALIZED, SIGMOID, SIGMOID_NORMALIZED, SOFTMAX_OF_SELECTED }) {
        const bool sigmoid = gating == SIGMOID || gating == SIGMOID_NORMALIZED;
        float      probs[n_expert], sum = 0;
        for (int e = 0; e < n_expert; ++e) {
            probs[e] = sigmoid ? 1 / (1 + std::exp(-logits[e])) : std::exp(logits[e]);
            sum += probs[e];
        }
        Forecast same = { 1, 1, 0, { 1, 3, 0 }, {} };
        for (int e = 0; e < n_expert; ++e) {
            same.probability.push_back(probs[e] / sum);
            if (!sigmoid) {
                probs[e] = gating == SOFTMAX_OF_SELECTED ? logits[e] : probs[e] / sum;
            }
        }
        const bool normalized = gating != SOFTMAX && gating != SIGMOID;
        auto weight_of = [&](int e, int other) {
            const float own = gating == SOFTMAX_OF_SELECTED ? std::exp(probs[e]) : probs[e];
            const float all = own + (gating == SOFTMAX_OF_SELECTED ? std::exp(probs[other]) : probs[other]);
            return scale * (normalized ? own / all : own);
        };

        int32_t experts[n_used] = { 1, 3 };
        float   weights[n_used] = { weight_of(1, 3), weight_of(3, 1) };
        const float before[n_used] = { weights[0], weights[1] };
        Speculation speculation;
        require(speculation.apply({ 1, n_expert, n_used, experts, weights, probs, logits, nullptr, normalized, gating == SOFTMAX_OF_SELECTED }, { same }), "a complete forecast is taken");
        require(experts[0] == 1 && experts[1] == 3, "experts stay those of the forecast");
        require(std::abs(weights[0] - before[0]) < 1e-5f && std::abs(weights[1] - before[1]) < 1e-5f, "weights stay what the model makes");

        // Another expert gets the weight that the model would have given it.
        Forecast other = same;
        other.experts = { 1, 0 };
        weights[0] = before[0];
        weights[1] = before[1];
        require(speculation.apply({ 1, n_expert, n_used, experts, weights, probs, logits, nullptr, normalized, gating == SOFTMAX_OF_SELECTED }, { other }), "taken");
        require(experts[1] == 0, "the forecast expert is computed");
        require(std::abs(weights[1] - weight_of(0, 1)) < 1e-5f && std::abs(weights[0] - weight_of(1, 0)) < 1e-5f, "with its own weight");
        require(speculation.counts().tokens == 2 && speculation.counts().slots == 4 && speculation.counts().right == 3, "counted");

        // Of a first layer nothing is forecast, and a forecast of fewer tokens is not taken for another's.
        experts[0] = 4;
        require(!speculation.apply({ 1, n_expert, n_used, experts, weights, probs, logits, nullptr, normalized, gating == SOFTMAX_OF_SELECTED }, {}), "nothing to take");
        require(!speculation.apply({ 1, n_expert, n_used, experts, weights, probs, logits, nullptr, normalized, gating == SOFTMAX_OF_SELECTED }, { same, same }), "too many");
        require(experts[0] == 4 && speculation.counts().slots == 4, "the router's choice stays");
    }
    return 0;
}
