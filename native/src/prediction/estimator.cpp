#include "prediction/estimator.h"

#include "ggml-cpu.h"

#include <cmath>

namespace pyorch {

static std::vector<float> copy(const float * values, size_t n) {
    return std::vector<float>(values, values + n);
}

Estimator::Estimator(const pyorch_estimator & w) :
        n_embd(w.n_embd), n_latent(w.n_latent), n_hidden(w.n_hidden), n_layers(w.n_layers), n_expert(w.n_expert),
        in_weight(copy(w.in_weight, (size_t) n_latent * n_embd)), in_bias(copy(w.in_bias, n_latent)),
        position(copy(w.position, (size_t) n_layers * n_latent)),
        up_weight(copy(w.up_weight, (size_t) n_hidden * n_latent)), up_bias(copy(w.up_bias, n_hidden)),
        down_weight(copy(w.down_weight, (size_t) n_latent * n_hidden)), down_bias(copy(w.down_bias, n_latent)),
        norm_weight(copy(w.norm_weight, n_latent)), norm_bias(copy(w.norm_bias, n_latent)),
        head_weight(copy(w.head_weight, (size_t) n_layers * n_expert * n_latent)),
        head_bias(copy(w.head_bias, (size_t) n_layers * n_expert)) {}

// to[n_rows] += weight[n_rows][n_columns] * input + bias
static void add_linear(const float * weight, const float * bias, const float * input, int n_rows, int n_columns,
                       float * to) {
    const auto dot = ggml_get_type_traits_cpu(GGML_TYPE_F32)->vec_dot;
    for (int r = 0; r < n_rows; ++r) {
        float product;
        dot(n_columns, &product, 0, weight + (size_t) r * n_columns, 0, input, 0, 1);
        to[r] += product + bias[r];
    }
}

static void normalize(const float * weight, const float * bias, std::vector<float> & values) {
    static constexpr double EPS = 1e-5;
    double sum = 0, squares = 0;
    for (float v : values) {
        sum += v;
    }
    const double mean = sum / values.size();
    for (float v : values) {
        squares += (v - mean) * (v - mean);
    }
    const double scale = 1 / std::sqrt(squares / values.size() + EPS);
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = (float) ((values[i] - mean) * scale) * weight[i] + bias[i];
    }
}

void Estimator::correct(int layer, const float * state, float * logits) const {
    const float * known = position.data() + (size_t) layer * n_latent;
    std::vector<float> latent(known, known + n_latent), hidden(n_hidden);
    add_linear(in_weight.data(), in_bias.data(), state, n_latent, n_embd, latent.data());
    add_linear(up_weight.data(), up_bias.data(), latent.data(), n_hidden, n_latent, hidden.data());
    for (float & h : hidden) {
        h /= 1 + std::exp(-h);
    }
    add_linear(down_weight.data(), down_bias.data(), hidden.data(), n_latent, n_hidden, latent.data());
    normalize(norm_weight.data(), norm_bias.data(), latent);
    add_linear(head_weight.data() + (size_t) layer * n_expert * n_latent, head_bias.data() + (size_t) layer * n_expert,
        latent.data(), n_expert, n_latent, logits);
}

} // namespace pyorch
