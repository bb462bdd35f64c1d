#include "routing/speculation.h"

#include <algorithm>
#include <numeric>

namespace pyorch {

bool Speculation::apply(const RoutedBatch & it, const std::vector<Forecast> & forecasts) {
    pyorch_speculation_counts now = {};
    now.tokens = it.n_tokens;
    const bool complete = (int) forecasts.size() == it.n_tokens && std::all_of(forecasts.begin(), forecasts.end(), [&](const Forecast & f) {
        return (int) f.experts.size() >= it.n_used && (int) f.probability.size() == it.n_expert;
    });
    for (int t = 0; t < (complete ? it.n_tokens : 0); ++t) {
        const Forecast & f       = forecasts[t];
        int32_t *        experts = it.experts + (size_t) t * it.n_used;
        float *          weights = it.weights + (size_t) t * it.n_used;
        const float *    probs   = it.probs   + (size_t) t * it.n_expert;
        // What the model does to the probabilities on their way to weights, it does to the forecast ones.
        float chosen = 0;
        for (int s = 0; s < it.n_used; ++s) {
            chosen += f.probability[f.experts[s]];
        }
        const float scale = it.normalized ? std::accumulate(weights, weights + it.n_used, 0.0f) / chosen :
            weights[0] / probs[experts[0]] * std::accumulate(probs, probs + it.n_expert, 0.0f);
        for (int s = 0; s < it.n_used; ++s) {
            now.right += std::find(f.experts.begin(), f.experts.begin() + it.n_used, experts[s]) != f.experts.begin() + it.n_used;
        }
        for (int s = 0; s < it.n_used; ++s) {
            experts[s] = f.experts[s];
            weights[s] = scale * f.probability[f.experts[s]];
        }
        now.slots += it.n_used;
    }
    std::lock_guard<std::mutex> lock(mutex);
    counted.tokens += now.tokens;
    counted.slots  += now.slots;
    counted.right  += now.right;
    return complete;
}

pyorch_speculation_counts Speculation::counts() const {
    std::lock_guard<std::mutex> lock(mutex);
    return counted;
}

void Speculation::reset_counts() {
    std::lock_guard<std::mutex> lock(mutex);
    counted = {};
}

} // namespace pyorch
