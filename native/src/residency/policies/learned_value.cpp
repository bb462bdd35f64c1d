#include "residency/policies/learned_value.h"

#include <algorithm>
#include <cstring>

namespace pyorch {
namespace {

constexpr float HALF_LIVES[] = { 12, 48, 400 }; // visits
constexpr float BIAS_SHARE   = 0.3f;            // of the tables' step, for the bias
constexpr float FEATURE_STEP = 0.5f;            // Adagrad's, for the weights
constexpr float FIRST_AGE    = 20;
constexpr float LEAST_COUNT  = 1e-12f; // smaller numbers are slow, and of no effect
constexpr float MOST_LOGIT   = 30;

// Added to votes and to 1 - votes, so that both have a logarithm.
constexpr float LEAST_VOTES = 0.02f;

constexpr int LANES = 8;

constexpr float TABLE_STEP = 0.02f; // on the active rows

float as_float(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

int32_t as_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

// The natural logarithm of a normal number above 0, to 1e-7: x = 2^k * m with m around 1, and the series of the inverse
// hyperbolic tangent for log m.
inline float log_of(float x) {
    constexpr int32_t ROOT_HALF = 0x3f3504f3;
    const int32_t     bits      = as_bits(x);
    const int32_t     k         = (bits - ROOT_HALF) >> 23;
    const float       m         = as_float(bits - k * (1 << 23));
    const float       s         = (m - 1) / (m + 1);
    const float       s2        = s * s;
    const float       tail      = s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9))));
    return (float) k * 0.69314718f + 2 * s * (1 + tail);
}

// e^x for x of at most 80 either way, to 1e-6: 2^k times a polynomial.
inline float exp_of(float x) {
    constexpr float ROUND = 12582912; // 1.5 * 2^23: adding it rounds to an integer
    const float     t     = x * 1.44269504f;
    const float     k     = (t + ROUND) - ROUND;
    const float     r     = (t - k) * 0.69314718f;
    const float     p =
        1 + r * (1 + r * (1.0f / 2 + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720))))));
    return p * as_float(((int32_t) k + 127) << 23);
}

float sum_of_products(const float * __restrict a, const float * __restrict b, int n) {
    float sums[LANES] = {};
    for (int i = 0; i < n; i += LANES) {
        for (int j = 0; j < LANES; ++j) {
            sums[j] += a[i + j] * b[i + j];
        }
    }
    float sum = 0;
    for (float s : sums) {
        sum += s;
    }
    return sum;
}

void add(float * __restrict to, const float * __restrict row, int n) {
    for (int i = 0; i < n; ++i) {
        to[i] += row[i];
    }
}

void add_scaled(float * __restrict to, const float * __restrict row, float scale, int n) {
    for (int i = 0; i < n; ++i) {
        to[i] += scale * row[i];
    }
}

void fade(float * __restrict count, const float * __restrict hit, float share, int n) {
    for (int i = 0; i < n; ++i) {
        const float c = count[i] + share * (hit[i] - count[i]);
        count[i]      = c < LEAST_COUNT ? LEAST_COUNT : c;
    }
}

void log_counts(float * __restrict to, const float * __restrict count, float zero, int n) {
    for (int i = 0; i < n; ++i) {
        to[i] = log_of(count[i] + 2e-3f) - zero;
    }
}

void log_ages(float * __restrict to, float * __restrict age, const float * __restrict hit, int n) {
    for (int i = 0; i < n; ++i) {
        age[i] = (1 - hit[i]) * (age[i] + 1);
        to[i]  = log_of(1 + age[i]) - 2;
    }
}

void logits(float * __restrict to, const float * __restrict votes, int n) {
    for (int i = 0; i < n; ++i) {
        const float vote = votes[i] > 1 ? 1 : votes[i];
        to[i]            = log_of((vote + LEAST_VOTES) / (1 - vote + LEAST_VOTES)) + 0.5f;
    }
}

void sigmoid(float * __restrict to, const float * __restrict logit, int n) {
    for (int i = 0; i < n; ++i) {
        float x = logit[i];
        x       = x > MOST_LOGIT ? MOST_LOGIT : x;
        x       = x < -MOST_LOGIT ? -MOST_LOGIT : x;
        to[i]   = 1 / (1 + exp_of(-x));
    }
}

void differ(float * __restrict error, const float * __restrict past, const float * __restrict hit,
    const float * __restrict value, int n) {
    for (int i = 0; i < n; ++i) {
        error[i] = past[i] - (hit[i] + (1 - hit[i]) * (float) DISCOUNT * value[i]);
    }
}

int widest(const std::vector<int> & n_experts) { return *std::max_element(n_experts.begin(), n_experts.end()); }

} // namespace

LearnedValue::LearnedValue(const std::vector<int> & n_experts, int n_used_) :
        n_layers((int) n_experts.size()), n_expert(widest(n_experts)), width((n_expert + LANES - 1) / LANES * LANES),
        n_used(std::clamp(n_used_, 1, n_expert)), weights{ 0.4f, 0.3f, 0, 0, 1, 1, 1, 0, 0 }, hit(width), logit(width),
        value(width), error(width), moments(n_layers, n_expert, n_used), votes((size_t) moments.n_words() * 32) {
    const float share = (float) n_used / (float) n_expert;
    const float odds  = share < 1 ? share / (1 - share) : 1e3f;
    weights.back()    = std::log(odds + 1e-3f);
    squares.fill(1e-2f);
    for (Row & feature : features) {
        feature.resize(width);
    }
    for (int n : n_experts) {
        Layer layer;
        layer.n_expert = n;
        for (Row & count : layer.counts) {
            count.assign(width, share);
        }
        layer.age.assign(width, FIRST_AGE);
        layer.bias.resize(width);
        layer.tables.assign(N_TABLES, Row((size_t) n_expert * width));
        layer.published.assign(n, share);
        layers.push_back(std::move(layer));
    }
}

// Computes the values of a layer's experts after a visit.
void LearnedValue::look(Layer & layer, const Visit & visit, const Active & active) {
    std::fill(hit.begin(), hit.end(), 0.0f);
    for (int expert : visit.experts) {
        hit[expert] = 1;
    }
    const float zero = std::log((float) n_used / (float) n_expert);
    for (int i = 0; i < N_COUNTS; ++i) {
        fade(layer.counts[i].data(), hit.data(), 1 - std::exp2(-1 / HALF_LIVES[i]), width);
        log_counts(features[i].data(), layer.counts[i].data(), zero, width);
    }
    log_ages(features[N_COUNTS].data(), layer.age.data(), hit.data(), width);
    for (int t = 0; t < N_TABLES; ++t) {
        Row & sum = features[N_COUNTS + 1 + t];
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int row : active[t]) {
            add(sum.data(), layer.tables[t].data() + (size_t) row * width, width);
        }
    }
    Row & voted = features[N_ROWS - 1];
    std::fill(voted.begin(), voted.end(), 0.0f);
    if (moments.votes(visit.context, visit.layer, votes.data())) {
        logits(voted.data(), votes.data(), layer.n_expert);
    }
}

// Moves the past value towards the observed uses.
void LearnedValue::teach(Layer & layer, const Past & past) {
    differ(error.data(), past.value.data(), hit.data(), value.data(), width);
    std::fill(error.begin() + layer.n_expert, error.end(), 0.0f);
    for (int i = 0; i < N_WEIGHTS; ++i) {
        float gradient = 0;
        if (i < N_ROWS) {
            gradient = sum_of_products(past.features[i].data(), error.data(), width);
        } else {
            for (int e = 0; e < layer.n_expert; ++e) {
                gradient += error[e];
            }
        }
        squares[i] += gradient * gradient / (float) n_layers;
        weights[i] -= FEATURE_STEP / (float) n_layers * gradient / std::sqrt(squares[i]);
    }
    for (int t = 0; t < N_TABLES; ++t) {
        // Many active rows, of several sequences, would together move a value too far.
        const float each =
            TABLE_STEP * std::min(1.0f, (float) n_used / (float) std::max<size_t>(1, past.active[t].size()));
        for (int row : past.active[t]) {
            add_scaled(layer.tables[t].data() + (size_t) row * width, error.data(), -each, width);
        }
    }
    add_scaled(layer.bias.data(), error.data(), -BIAS_SHARE * TABLE_STEP, width);
}

void LearnedValue::visit(const Visit & visit) {
    Layer &   layer   = layers[visit.layer];
    Passage & passage = passages[visit.context];
    passage.past.resize(n_layers);
    Past & past = passage.past[visit.layer];

    const Active active = { visit.experts, passage.previous, past.active[0] };
    moments.visit(visit);
    look(layer, visit, active);
    std::copy(layer.bias.begin(), layer.bias.end(), logit.begin());
    for (int i = 0; i < N_ROWS; ++i) {
        add_scaled(logit.data(), features[i].data(), weights[i], width);
    }
    for (float & x : logit) {
        x += weights.back();
    }
    sigmoid(value.data(), logit.data(), width);
    if (past.known && visit.continues) {
        teach(layer, past);
    }

    past.known       = true;
    past.features    = features;
    past.value       = value;
    past.active      = active;
    passage.previous = visit.experts;
    std::copy_n(value.begin(), layer.n_expert, layer.published.begin());
}

void LearnedValue::forget(const void * context) {
    passages.erase(context);
    moments.forget(context);
}

LearnedValue::State LearnedValue::export_state() const {
    State state;
    state.weights.assign(weights.begin(), weights.end());
    state.weights.insert(state.weights.end(), squares.begin(), squares.end());
    for (const Layer & layer : layers) {
        for (const Row & count : layer.counts) {
            state.counts.insert(state.counts.end(), count.begin(), count.begin() + n_expert);
        }
        state.bias.insert(state.bias.end(), layer.bias.begin(), layer.bias.begin() + n_expert);
        for (const Row & table : layer.tables) {
            for (int row = 0; row < n_expert; ++row) {
                const auto begin = table.begin() + (size_t) row * width;
                state.tables.insert(state.tables.end(), begin, begin + n_expert);
            }
        }
    }
    moments.export_tokens(state.moments, state.previous);
    return state;
}

void LearnedValue::import_state(const State & state) {
    std::copy_n(state.weights.begin(), N_WEIGHTS, weights.begin());
    std::copy_n(state.weights.begin() + N_WEIGHTS, N_WEIGHTS, squares.begin());
    auto count = state.counts.begin(), bias = state.bias.begin(), row = state.tables.begin();
    for (Layer & layer : layers) {
        for (Row & counts : layer.counts) {
            std::copy_n(count, n_expert, counts.begin());
            count += n_expert;
        }
        std::copy_n(bias, n_expert, layer.bias.begin());
        bias += n_expert;
        for (Row & table : layer.tables) {
            for (int i = 0; i < n_expert; ++i, row += n_expert) {
                std::copy_n(row, n_expert, table.begin() + (size_t) i * width);
            }
        }
    }
    moments.import_tokens(state.moments, state.previous);
    passages.clear();
}

} // namespace pyorch
