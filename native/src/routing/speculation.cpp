#include "routing/speculation.h"

#include <algorithm>

namespace pyorch {

bool Speculation::apply(RoutedBatch & it, const std::vector<Forecast> & forecasts) {
    pyorch_speculation_counts now = {};
    now.tokens = it.n_tokens;
    const bool complete = (int) forecasts.size() == it.n_tokens && std::all_of(forecasts.begin(), forecasts.end(), [&](const Forecast & f) {
        return (int) f.weights.size() == it.n_used && (int) f.experts.size() >= it.n_used;
    });
    for (int t = 0; t < (complete ? it.n_tokens : 0); ++t) {
        const auto begin = forecasts[t].experts.begin();
        const auto end   = begin + it.n_used;
        const auto asked = it.requested + (size_t) t * it.n_used;
        now.right += std::count_if(asked, asked + it.n_used, [&](int32_t e) { return std::find(begin, end, e) != end; });
        now.slots += it.n_used;
        std::copy(begin, end, it.experts + (size_t) t * it.n_used);
        std::copy(forecasts[t].weights.begin(), forecasts[t].weights.end(), it.weights + (size_t) t * it.n_used);
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
