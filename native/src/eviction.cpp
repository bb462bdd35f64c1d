#include "eviction.h"

#include <algorithm>
#include <cmath>

namespace pyorch {
namespace {

class Lru : public EvictionPolicy {
public:
    void used(Usage & usage, uint64_t now) const override {
        usage.last_use = now;
    }

    double value(const Usage & usage, uint64_t) const override {
        return (double) usage.last_use;
    }
};

// Frequency with exponential fading: without it, what a first topic used would never leave.
class Lfu : public EvictionPolicy {
public:
    explicit Lfu(double half_life) : half_life(half_life) {}

    void used(Usage & usage, uint64_t now) const override {
        usage.frequency = (float) (value(usage, now) + 1.0);
        usage.last_use  = now;
    }

    double value(const Usage & usage, uint64_t now) const override {
        return usage.frequency * std::exp2(-(double) (now - usage.last_use) / half_life);
    }

private:
    double half_life;
};

} // namespace

std::unique_ptr<EvictionPolicy> make_policy(pyorch_policy policy, int n_moe_layers) {
    constexpr double HALF_LIFE_TOKENS = 32;
    if (policy == PYORCH_LFU) {
        return std::make_unique<Lfu>(HALF_LIFE_TOKENS * std::max(1, n_moe_layers));
    }
    return std::make_unique<Lru>();
}

} // namespace pyorch
