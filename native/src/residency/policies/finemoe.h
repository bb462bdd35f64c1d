// The least frequently used expert goes first, but before it those that no predictor names.

#pragma once

#include "residency/policies/lfu.h"

#include <algorithm>

namespace pyorch {

// The inverse of FineMoE's eviction priority 1 / (p * freq) (section 4.5), as a logarithm.
class FineMoe : public Lfu {
public:
    using Lfu::Lfu;

    double value(const Usage & usage, float probability, bool) const override {
        // Experts that no forecast names are still told apart by their frequency.
        constexpr float LEAST = 1e-3f;
        return usage.heat + std::log2(std::max(probability, LEAST));
    }

    bool takes_forecasts() const override { return true; }
};

} // namespace pyorch
