// Weights of no model.

#pragma once

#include <random>
#include <vector>

namespace pyorch {

// Normally distributed about 0. The same in each run of a program.
inline std::vector<float> random_weights(size_t n, float scale) {
    static std::mt19937             rng{ 1 };
    std::normal_distribution<float> values(0, scale);
    std::vector<float>              to(n);
    for (float & v : to) {
        v = values(rng);
    }
    return to;
}

} // namespace pyorch
