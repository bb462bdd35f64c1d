#include "prediction/estimator.h"

#include <cmath>

namespace pyorch {

static std::vector<float> copy(const float * values, size_t n) { return std::vector<float>(values, values + n); }

Estimator::Estimator(const pyorch_estimator & w) :
        n_embd(w.n_embd), n_latent(w.n_latent), n_hidden(w.n_hidden), n_layers(w.n_layers), n_expert(w.n_expert),
        in_weight(w.in_weight, n_latent, n_embd), up_weight(w.up_weight, n_hidden, n_latent),
        down_weight(w.down_weight, n_latent, n_hidden),
        head_weight(w.head_weight, (size_t) n_layers * n_expert, n_latent), in_bias(copy(w.in_bias, n_latent)),
        position(copy(w.position, (size_t) n_layers * n_latent)), up_bias(copy(w.up_bias, n_hidden)),
        down_bias(copy(w.down_bias, n_latent)), norm_weight(copy(w.norm_weight, n_latent)),
        norm_bias(copy(w.norm_bias, n_latent)), head_bias(copy(w.head_bias, (size_t) n_layers * n_expert)) {}

// to[inputs.size()][n_rows] += rows [begin, begin + n_rows) of weight times each input, plus bias[n_rows]
static void add_linear(const CompactMatrix & weight, size_t begin, size_t n_rows, const float * bias,
    const std::vector<CompactVector> & inputs, float * to) {
    weight.multiply(inputs, begin, n_rows, to);
    for (size_t i = 0; i < inputs.size(); ++i) {
        for (size_t r = 0; r < n_rows; ++r) {
            to[i * n_rows + r] += bias[r];
        }
    }
}

static std::vector<CompactVector> compact(const std::vector<float> & rows, int n_columns) {
    std::vector<CompactVector> inputs;
    for (size_t at = 0; at < rows.size(); at += n_columns) {
        inputs.emplace_back(rows.data() + at, n_columns);
    }
    return inputs;
}

// values[n]
static void normalize(const float * weight, const float * bias, float * values, int n) {
    static constexpr double EPS = 1e-5;
    double                  sum = 0, squares = 0;
    for (int i = 0; i < n; ++i) {
        sum += values[i];
    }
    const double mean = sum / n;
    for (int i = 0; i < n; ++i) {
        squares += (values[i] - mean) * (values[i] - mean);
    }
    const double scale = 1 / std::sqrt(squares / n + EPS);
    for (int i = 0; i < n; ++i) {
        values[i] = (float) ((values[i] - mean) * scale) * weight[i] + bias[i];
    }
}

void Estimator::correct(int layer, const std::vector<CompactVector> & states, float * logits) const {
    std::vector<float> latent(states.size() * n_latent), hidden(states.size() * n_hidden);
    for (size_t i = 0; i < latent.size(); ++i) {
        latent[i] = position[(size_t) layer * n_latent + i % n_latent];
    }
    add_linear(in_weight, 0, n_latent, in_bias.data(), states, latent.data());
    add_linear(up_weight, 0, n_hidden, up_bias.data(), compact(latent, n_latent), hidden.data());
    for (float & h : hidden) {
        h /= 1 + std::exp(-h);
    }
    add_linear(down_weight, 0, n_latent, down_bias.data(), compact(hidden, n_hidden), latent.data());
    for (size_t at = 0; at < latent.size(); at += n_latent) {
        normalize(norm_weight.data(), norm_bias.data(), latent.data() + at, n_latent);
    }
    add_linear(head_weight, (size_t) layer * n_expert, n_expert, head_bias.data() + (size_t) layer * n_expert,
        compact(latent, n_latent), logits);
}

} // namespace pyorch
