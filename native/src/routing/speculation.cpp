#include "routing/speculation.h"

#include <algorithm>

namespace pyorch {

// Whether each token has a forecast.
static bool is_complete(const RoutedBatch & batch, const std::vector<Forecast> & forecasts) {
    return (int) forecasts.size() == batch.n_tokens &&
        std::all_of(forecasts.begin(), forecasts.end(), [&](const Forecast & f) {
            return (int) f.weights.size() == batch.n_used && (int) f.experts.size() >= batch.n_used;
        });
}

// Counts slots computed as forecast: all slots if forecasts are executed, otherwise those with the same router's
// choice. Returns is_complete().
bool Speculation::count(const RoutedBatch & batch, const std::vector<Forecast> & forecasts, bool executed) {
    pyorch_speculation_counts now = {};
    now.tokens                    = batch.n_tokens;
    const bool complete           = is_complete(batch, forecasts);
    for (int t = 0; t < (complete ? batch.n_tokens : 0); ++t) {
        const auto begin = forecasts[t].experts.begin();
        const auto end   = begin + batch.n_used;
        const auto asked = batch.requested + (size_t) t * batch.n_used;
        now.right +=
            std::count_if(asked, asked + batch.n_used, [&](int32_t e) { return std::find(begin, end, e) != end; });
    }
    now.slots = !executed ? now.right : complete ? (uint64_t) batch.n_tokens * batch.n_used : 0;
    MutexLock lock(mutex);
    counted.tokens += now.tokens;
    counted.slots += now.slots;
    counted.right += now.right;
    return complete;
}

bool Speculation::apply(RoutedBatch & batch, const std::vector<Forecast> & forecasts) {
    const bool complete = count(batch, forecasts, true);
    for (int t = 0; t < (complete ? batch.n_tokens : 0); ++t) {
        const Forecast & f = forecasts[t];
        std::copy_n(f.experts.begin(), batch.n_used, batch.experts + (size_t) t * batch.n_used);
        std::copy(f.weights.begin(), f.weights.end(), batch.weights + (size_t) t * batch.n_used);
    }
    return complete;
}

bool Speculation::mark(RoutedBatch & batch, const std::vector<Forecast> & forecasts) {
    const bool complete = count(batch, forecasts, false);
    batch.guessed.assign(complete ? batch.n_expert : 0, 0);
    for (int t = 0; t < (complete ? batch.n_tokens : 0); ++t) {
        for (int i = 0; i < batch.n_used; ++i) {
            batch.guessed[forecasts[t].experts[i]] = 1;
        }
    }
    return complete;
}

pyorch_speculation_counts Speculation::counts() const {
    MutexLock lock(mutex);
    return counted;
}

void Speculation::reset_counts() {
    MutexLock lock(mutex);
    counted = {};
}

} // namespace pyorch
