#include "prediction/router.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace pyorch {
namespace {

// llama.cpp's build_moe_ffn divides by at least this, the smallest normal number of F16.
constexpr float LEAST_SUM = 6.103515625e-5f;

float gated(int32_t gating, float logit) {
    switch (gating) {
    case PYORCH_GATING_SIGMOID: return 1 / (1 + std::exp(-logit));
    case PYORCH_GATING_SQRT_SOFTPLUS: return std::sqrt(logit > 20 ? logit : std::log1p(std::exp(logit)));
    default: return logit;
    }
}

void softmax(float * values, size_t n) {
    const float most = *std::max_element(values, values + n);
    float       sum  = 0;
    for (size_t i = 0; i < n; ++i) {
        values[i] = std::exp(values[i] - most);
        sum += values[i];
    }
    std::transform(values, values + n, values, [&](float p) { return p / sum; });
}

// Leaves only the groups with the highest sums of their two best experts.
void mask_groups(const Router & router, std::vector<float> & scores) {
    const int          size = router.n_expert / router.n_groups;
    std::vector<float> best;
    for (int g = 0; g < router.n_groups; ++g) {
        const std::vector<int> two = top(scores.data() + g * size, size, 2);
        best.push_back(std::accumulate(
            two.begin(), two.end(), 0.0f, [&](float sum, int e) { return sum + scores[g * size + e]; }));
    }
    const std::vector<int> order = top(best.data(), router.n_groups, router.n_groups);
    for (int g = router.n_groups_used; g < router.n_groups; ++g) {
        std::fill_n(scores.begin() + order[g] * size, size, -INFINITY);
    }
}

} // namespace

std::vector<int> top(const float * values, int n_values, int n) {
    std::vector<int> order(n_values);
    std::iota(order.begin(), order.end(), 0);
    n = std::min(n, n_values);
    std::partial_sort(order.begin(), order.begin() + n, order.end(),
        [&](int a, int b) { return values[a] != values[b] ? values[a] > values[b] : a < b; });
    order.resize(n);
    return order;
}

bool known(int32_t gating) { return gating >= PYORCH_GATING_SOFTMAX && gating <= PYORCH_GATING_SQRT_SOFTPLUS; }

Choice choose(const Router & router, const std::vector<float> & logits, int n_experts) {
    std::vector<float> probs = logits;
    std::transform(probs.begin(), probs.end(), probs.begin(), [&](float z) { return gated(router.gating, z); });
    if (router.gating == PYORCH_GATING_SOFTMAX) {
        softmax(probs.data(), probs.size());
    }
    // Gating keeps the order of logits but can round two of them to the same probability.
    std::vector<float> scores = router.selection_bias || router.n_groups > 1 ? probs : logits;
    if (router.selection_bias) {
        std::transform(scores.begin(), scores.end(), router.selection_bias, scores.begin(), std::plus<float>());
    }
    if (router.n_groups > 1) {
        mask_groups(router, scores);
    }
    Choice choice;
    choice.experts = top(scores.data(), router.n_expert, std::max(n_experts, router.n_used));
    while ((int) choice.experts.size() > router.n_used && scores[choice.experts.back()] == -INFINITY) {
        choice.experts.pop_back();
    }
    for (int s = 0; s < router.n_used; ++s) {
        choice.weights.push_back(probs[choice.experts[s]]);
    }
    if (router.gating == PYORCH_GATING_SOFTMAX_SELECTED) {
        softmax(choice.weights.data(), choice.weights.size());
    }
    float factor = router.scale;
    if (router.normalized) {
        factor /= std::max(std::accumulate(choice.weights.begin(), choice.weights.end(), 0.0f), LEAST_SUM);
    }
    for (float & w : choice.weights) {
        w *= factor;
    }
    choice.probability = std::move(probs);
    make_distribution(router.gating, choice.probability.data(), router.n_expert);
    return choice;
}

void make_distribution(int32_t gating, float * probs, int n_expert) {
    if (gating == PYORCH_GATING_SOFTMAX_SELECTED) {
        softmax(probs, n_expert);
        return;
    }
    const float sum = std::accumulate(probs, probs + n_expert, 0.0f);
    std::transform(probs, probs + n_expert, probs, [&](float p) { return p / sum; });
}

void Routers::set(int layer, const Router & router, const void * model, std::string why) {
    MutexLock lock(mutex);
    entries[layer].router = router;
    entries[layer].model  = model;
    entries[layer].why    = std::move(why);
}

bool Routers::has_copy(int layer, const void * model) const {
    MutexLock lock(mutex);
    return entries[layer].model == model && !entries[layer].gate.empty();
}

void Routers::set_copy(int layer, const Router & router, const void * model) {
    auto copy = [](const float * values, size_t n, std::vector<float> & to) -> const float * {
        to.assign(values, values ? values + n : values);
        return values ? to.data() : nullptr;
    };
    MutexLock lock(mutex);
    Entry &   e             = entries[layer];
    e.router                = router;
    e.model                 = model;
    e.router.gate           = copy(router.gate, (size_t) router.n_expert * router.n_embd, e.gate);
    e.router.bias           = copy(router.bias, router.n_expert, e.bias);
    e.router.selection_bias = copy(router.selection_bias, router.n_expert, e.selection_bias);
    e.router.norm           = copy(router.norm, router.n_embd, e.norm);
    e.why.clear();
}

bool Routers::forget(const void * model) {
    MutexLock lock(mutex);
    bool      had = false;
    for (Entry & e : entries) {
        if (e.model == model) {
            e   = {};
            had = true;
        }
    }
    return had;
}

std::vector<Router> Routers::all() const {
    MutexLock           lock(mutex);
    std::vector<Router> routers;
    for (const Entry & e : entries) {
        routers.push_back(e.router);
    }
    return routers;
}

std::string Routers::unknown() const {
    MutexLock lock(mutex);
    for (const Entry & e : entries) {
        if (!e.why.empty()) {
            return e.why;
        }
    }
    return "";
}

} // namespace pyorch
