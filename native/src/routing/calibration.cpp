#include "routing/calibration.h"

#include <algorithm>

namespace pyorch {

Calibration::Calibration(const std::vector<int> & n_expert) {
    for (int n : n_expert) {
        layers.push_back({ n, 0, {}, {} });
    }
}

void Calibration::set(bool on_) {
    MutexLock lock(mutex);
    if (on_) {
        for (auto & l : layers) {
            l = { l.n_expert, 0, {}, std::vector<uint64_t>(l.n_expert) };
        }
    }
    on = on_;
}

void Calibration::add(int layer, const int32_t * ids, int64_t n_slots, const float * outputs, int n_embd) {
    MutexLock lock(mutex);
    Layer &   l = layers[layer];
    if (l.sums.empty()) {
        l.n_embd = n_embd;
        l.sums.resize((size_t) l.n_expert * n_embd);
    }
    for (int64_t s = 0; s < n_slots; ++s) {
        double *      sum = l.sums.data() + (size_t) ids[s] * n_embd;
        const float * out = outputs + s * n_embd;
        for (int i = 0; i < n_embd; ++i) {
            sum[i] += out[i];
        }
        ++l.counts[ids[s]];
    }
}

bool Calibration::means(int layer, float * vectors, uint64_t * counts, int n_embd) {
    MutexLock     lock(mutex);
    const Layer & l = layers[layer];
    if (!l.sums.empty() && l.n_embd != n_embd) {
        return false;
    }
    std::fill(vectors, vectors + (size_t) l.n_expert * n_embd, 0.0f);
    for (int e = 0; e < l.n_expert; ++e) {
        counts[e] = l.counts.empty() ? 0 : l.counts[e];
        for (int i = 0; i < n_embd && counts[e] > 0; ++i) {
            const size_t at = (size_t) e * n_embd + i;
            vectors[at]     = (float) (l.sums[at] / (double) counts[e]);
        }
    }
    return true;
}

} // namespace pyorch
