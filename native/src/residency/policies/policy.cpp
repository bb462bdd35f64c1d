#include "residency/policies/policy.h"

#include "base/status.h"

#include <algorithm>

namespace pyorch {
namespace {

class Lru : public EvictionPolicy {
public:
    void used(Usage & usage, uint64_t now) override { usage.last_use = now; }

    double value(const Usage & usage, float) const override { return (double) usage.last_use; }

    bool by_recency() const override { return true; }
};

// Frequency with exponential fading: without it, the experts of the first topic would stay forever. All frequencies
// fade alike. So the order is that of the logarithms without fading, which does not change with time.
class Lfu : public EvictionPolicy {
public:
    explicit Lfu(int n_layers) : half_life(HEAT_HALF_LIFE_TOKENS * std::max(1, n_layers)) {}

    void used(Usage & usage, uint64_t now) override {
        usage.heat     = fading_use(usage.heat, (double) now / half_life);
        usage.last_use = now;
    }

    double value(const Usage & usage, float) const override { return usage.heat; }

    double settled(double value) const override { return value + 1; }

private:
    double half_life; // in layers
};

// The inverse of FineMoE's eviction priority 1 / (p * freq) (section 4.5), as a logarithm.
class FineMoe : public Lfu {
public:
    using Lfu::Lfu;

    double value(const Usage & usage, float probability) const override {
        // Frequency tells apart the experts that no forecast names.
        constexpr float LEAST = 1e-3f;
        return usage.heat + std::log2(std::max(probability, LEAST));
    }

    bool takes_forecasts() const override { return true; }
};

// The value of a LearnedValue. An expert that was asked for by name has the highest value until its layer is visited.
class Learned : public EvictionPolicy {
public:
    void used(Usage & usage, uint64_t now) override {
        usage.last_use = now;
        usage.learned  = 1;
    }

    double value(const Usage & usage, float) const override { return usage.learned; }

    double settled(double value) const override { return 2.5 * value; }

    bool counts_turns() const override { return true; }
};

} // namespace

const Policies & policy_list() {
    static const Policies list = {
        { PYORCH_LRU, "lru", 0, 0, "the least recently used expert goes first", make_policy<Lru> },
        { PYORCH_LFU, "lfu", 0, 0, "the least frequently used goes first, and old uses fade", make_policy<Lfu> },
        { PYORCH_FINEMOE, "finemoe", 0, PYORCH_NEEDS_FORECASTS,
            "the least frequently used goes first, but before it the experts that no predictor names",
            make_policy<FineMoe> },
        { PYORCH_LEARNED, "learned", 0, 0, "what will be used latest goes first, as learned while decoding",
            make_policy<Learned>, true },
    };
    return list;
}

const PolicyEntry & find_policy(const Policies & policies, pyorch_policy kind) {
    const auto found =
        std::find_if(policies.begin(), policies.end(), [&](const PolicyEntry & entry) { return entry.kind == kind; });
    if (found == policies.end()) {
        throw Failure(PYORCH_INVALID, format("the eviction policy %d is not known here", (int) kind));
    }
    return *found;
}

} // namespace pyorch
