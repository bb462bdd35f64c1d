#include "prediction/activation_matrix.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace pyorch {

float dot(const float * a, const float * b, size_t n) {
    constexpr size_t LANES       = 16;
    float            sums[LANES] = {};
    size_t           i           = 0;
    for (; i + LANES <= n; i += LANES) {
        for (size_t j = 0; j < LANES; ++j) {
            sums[j] += a[i + j] * b[i + j];
        }
    }
    float sum = 0;
    for (; i < n; ++i) {
        sum += a[i] * b[i];
    }
    for (float s : sums) {
        sum += s;
    }
    return sum;
}

ActivationMatrixStore::ActivationMatrixStore(int n_layers, int n_expert, int capacity) :
        n_layers(n_layers), n_expert(n_expert), capacity(capacity), layers(n_layers) {}

bool ActivationMatrixStore::add(const float * counts) {
    ActivationMatrixSearch request(*this);
    request.set(counts);
    return request.add();
}

Match ActivationMatrixStore::nearest(const float * counts) {
    ActivationMatrixSearch request(*this);
    request.set(counts);
    return request.nearest();
}

int ActivationMatrixStore::size() const {
    std::lock_guard<std::mutex> lock(mutex);
    return (int) generation.size();
}

int ActivationMatrixStore::copy_to(float * counts, int n) const {
    std::lock_guard<std::mutex> lock(mutex);
    n = std::min(n, (int) generation.size());
    for (int i = 0; i < n && counts; ++i) {
        for (const Layer & layer : layers) {
            counts = std::copy_n(layer.rows.data() + (size_t) i * n_expert, n_expert, counts);
        }
    }
    return n;
}

bool ActivationMatrixStore::row(const Match & match, int layer, float * probs, int n) const {
    std::lock_guard<std::mutex> lock(mutex);
    if (generation[match.index] != match.generation) {
        return false;
    }
    const float * counts = layers[layer].rows.data() + (size_t) match.index * n_expert;
    for (int e = 0; e < n; ++e) {
        probs[e] = counts[e] * layers[layer].inverse_sum[match.index];
    }
    return true;
}

ActivationMatrixSearch::ActivationMatrixSearch(ActivationMatrixStore & store) :
        store(store), counts((size_t) store.n_layers * store.n_expert), layers(store.n_layers) {}

void ActivationMatrixSearch::begin() { set(std::vector<float>(counts.size()).data()); }

void ActivationMatrixSearch::set(const float * values) {
    counts.assign(values, values + counts.size());
    for (Layer & layer : layers) {
        layer.sum   = std::accumulate(values, values + store.n_expert, 0.0f);
        layer.stale = true;
        values += store.n_expert;
    }
}

void ActivationMatrixSearch::count(int layer, const int32_t * experts, size_t n) {
    float * row = counts.data() + (size_t) layer * store.n_expert;
    for (size_t i = 0; i < n; ++i) {
        row[experts[i]] += 1;
    }
    layers[layer].sum += n;
    layers[layer].stale = true;
}

Match ActivationMatrixSearch::nearest() {
    std::lock_guard<std::mutex> lock(store.mutex);
    return nearest_locked();
}

Match ActivationMatrixSearch::nearest_locked() {
    const size_t size = store.generation.size();
    const size_t E    = store.n_expert;
    double       own  = 0;
    for (int l = 0; l < store.n_layers; ++l) {
        Layer &       layer = layers[l];
        const float * row   = counts.data() + l * E;
        if (layer.sum <= 0) {
            continue;
        }
        own += (double) dot(row, row, E) / ((double) layer.sum * layer.sum);
        if (layer.stale || changes != store.changes) {
            const auto & past = store.layers[l];
            layer.dots.resize(size);
            for (size_t c = 0; c < size; ++c) {
                layer.dots[c] = dot(past.rows.data() + c * E, row, E) * past.inverse_sum[c] / layer.sum;
            }
            layer.stale = false;
        }
    }
    changes = store.changes;

    Match match;
    for (size_t c = 0; c < size && own > 0; ++c) {
        double sum = 0, squares = 0;
        for (int l = 0; l < store.n_layers; ++l) {
            if (layers[l].sum > 0) {
                sum += layers[l].dots[c];
                squares += store.layers[l].squares[c];
            }
        }
        const float score = squares > 0 ? std::min((float) (sum / std::sqrt(squares * own)), 1.0f) : 0;
        if (squares > 0 && (match.index < 0 || score > match.score)) {
            match = { (int) c, score, store.generation[c] };
        }
    }
    return match;
}

bool ActivationMatrixSearch::row(int layer, float * probs, int n) const {
    const float sum = layers[layer].sum;
    for (int e = 0; e < n && sum > 0; ++e) {
        probs[e] = counts[(size_t) layer * store.n_expert + e] / sum;
    }
    return sum > 0;
}

bool ActivationMatrixSearch::add() {
    float most = 0;
    for (float n : counts) {
        if (!(n >= 0) || !std::isfinite(n)) {
            return false;
        }
        most = std::max(most, n);
    }
    if (most == 0) {
        return false;
    }
    std::lock_guard<std::mutex> lock(store.mutex);
    const size_t                E     = store.n_expert;
    size_t                      entry = store.generation.size();
    if (entry == (size_t) store.capacity) {
        entry = std::max(nearest_locked().index, 0);
    } else {
        store.generation.push_back(0);
    }
    for (int l = 0; l < store.n_layers; ++l) {
        auto & past = store.layers[l];
        if (past.inverse_sum.size() <= entry) {
            past.rows.resize((entry + 1) * E);
            past.inverse_sum.resize(entry + 1);
            past.squares.resize(entry + 1);
        }
        const float * row     = counts.data() + l * E;
        const float   inverse = layers[l].sum > 0 ? 1 / layers[l].sum : 0;
        std::copy_n(row, E, past.rows.data() + entry * E);
        past.inverse_sum[entry] = inverse;
        past.squares[entry]     = dot(row, row, E) * inverse * inverse;
    }
    store.generation[entry]++;
    store.changes++;
    return true;
}

} // namespace pyorch
