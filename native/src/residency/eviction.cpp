#include "residency/eviction.h"

#include <algorithm>

namespace pyorch {
namespace {

class Lru : public EvictionPolicy {
public:
    void used(Usage & usage, uint64_t now) const override {
        usage.last_use = now;
    }

    double value(const Usage & usage, float) const override {
        return (double) usage.last_use;
    }
};

// Frequency with exponential fading: without it, what a first topic used would never leave. All frequencies fade
// alike, so their order is that of their logarithms with the fading left out, and that does not change with time.
class Lfu : public EvictionPolicy {
public:
    explicit Lfu(double half_life) : half_life(half_life) {}

    void used(Usage & usage, uint64_t now) const override {
        const double fading = (double) now / half_life;
        usage.heat     = std::log2(std::exp2(usage.heat - fading) + 1) + fading;
        usage.last_use = now;
    }

    double value(const Usage & usage, float) const override {
        return usage.heat;
    }

private:
    double half_life;
};

// The inverse of FineMoE's eviction priority 1 / (p * freq) (section 4.5), as a logarithm.
class FineMoe : public Lfu {
    using Lfu::Lfu;

    double value(const Usage & usage, float probability) const override {
        // Experts that no forecast names are still told apart by their frequency.
        constexpr float LEAST = 1e-3f;
        return usage.heat + std::log2(std::max(probability, LEAST));
    }

    bool takes_forecasts() const override { return true; }
};

// What is needed last goes first: the bound of what a policy can do on demand.
class Belady : public Lru {
    double value(const Usage & usage, float) const override {
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
