#include "residency/eviction.h"

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
        usage.frequency = (float) (frequency(usage, now) + 1.0);
        usage.last_use  = now;
    }

    double value(const Usage & usage, uint64_t now) const override {
        return frequency(usage, now);
    }

protected:
    double frequency(const Usage & usage, uint64_t now) const {
        return usage.frequency * std::exp2(-(double) (now - usage.last_use) / half_life);
    }

private:
    double half_life;
};

// The inverse of FineMoE's eviction priority 1 / (p * freq) (section 4.5).
class FineMoe : public Lfu {
    using Lfu::Lfu;

    double value(const Usage & usage, uint64_t now) const override {
        // Experts that no forecast names are still told apart by their frequency.
        constexpr double LEAST = 1e-3;
        return std::max<double>(usage.probability, LEAST) * frequency(usage, now);
    }
};

// What is needed last goes first: the bound of what a policy can do on demand.
class Belady : public Lru {
    double value(const Usage & usage, uint64_t) const override {
        return -(double) usage.next_use;
    }
};

} // namespace

std::unique_ptr<EvictionPolicy> make_policy(pyorch_policy policy, int n_moe_layers) {
    constexpr double HALF_LIFE_TOKENS = 32;
    const double half_life = HALF_LIFE_TOKENS * std::max(1, n_moe_layers);
    switch (policy) {
        case PYORCH_LFU:     return std::make_unique<Lfu>(half_life);
        case PYORCH_FINEMOE: return std::make_unique<FineMoe>(half_life);
        case PYORCH_BELADY:  return std::make_unique<Belady>();
        default:             return std::make_unique<Lru>();
    }
}

} // namespace pyorch
