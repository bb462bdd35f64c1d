// The least frequently used expert goes first, and old uses fade.

#pragma once

#include "residency/policies/policy.h"

#include <algorithm>

namespace pyorch {

// Frequency with exponential fading: without it, what a first topic used would never leave. All frequencies fade
// alike, so their order is that of their logarithms with the fading left out, and that does not change with time.
class Lfu : public EvictionPolicy {
public:
    // n_moe_layers: layers that one token passes, the unit in which old uses fade.
    explicit Lfu(int n_moe_layers) : half_life(HEAT_HALF_LIFE_TOKENS * std::max(1, n_moe_layers)) {}

    void used(Usage & usage, uint64_t now) override {
        usage.heat     = fading_use(usage.heat, (double) now / half_life);
        usage.last_use = now;
    }

    double value(const Usage & usage, float, bool) const override { return usage.heat; }

    double settled(double value) const override { return value + 1; }

private:
    double half_life; // in layers
};

} // namespace pyorch
