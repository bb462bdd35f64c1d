#include "residency/eviction.h"

#include "residency/decay_bandit.h"
#include "residency/learned_value.h"

#include <algorithm>
#include <limits>
#include <random>

namespace pyorch {
namespace {

class Lru : public EvictionPolicy {
public:
    void used(Usage & usage, uint64_t now) override { usage.last_use = now; }

    double value(const Usage & usage, float, bool) const override { return (double) usage.last_use; }

    bool by_recency() const override { return true; }
};

// Frequency with exponential fading: without it, what a first topic used would never leave. All frequencies fade
// alike, so their order is that of their logarithms with the fading left out, and that does not change with time.
class Lfu : public EvictionPolicy {
public:
    explicit Lfu(double half_life) : half_life(half_life) {}

    void used(Usage & usage, uint64_t now) override {
        usage.heat     = fading_use(usage.heat, (double) now / half_life);
        usage.last_use = now;
    }

    double value(const Usage & usage, float, bool) const override { return usage.heat; }

    double settled(double value) const override { return value + 1; }

private:
    double half_life;
};

// The inverse of FineMoE's eviction priority 1 / (p * freq) (section 4.5), as a logarithm.
class FineMoe : public Lfu {
    using Lfu::Lfu;

    double value(const Usage & usage, float probability, bool) const override {
        // Experts that no forecast names are still told apart by their frequency.
        constexpr float LEAST = 1e-3f;
        return usage.heat + std::log2(std::max(probability, LEAST));
    }

    bool takes_forecasts() const override { return true; }
};

class Fifo : public Lru {
    double value(const Usage & usage, float, bool) const override { return (double) usage.came; }
};

// What is used is marked. When all are marked and one must go, a new phase begins without marks; of those without one
// any may go (Fiat et al., Competitive Paging Algorithms, 1991). A mark is the number of its phase and, behind the
// point, the order in which it goes in the next one, which is random: so none changes when a phase ends. But those of
// the running layer do: it is known what a layer uses before it is known what must go for it.
class Marking : public Lru {
    void used(Usage & usage, uint64_t now) override {
        Lru::used(usage, now);
        if (latest.empty() || latest.front()->last_use != now) {
            latest.clear();
        }
        latest.push_back(&usage);
        mark(usage);
    }

    void evicted(const Usage & usage) override {
        if (usage.mark >= (double) phase) {
            ++phase;
            for (Usage * other : latest) {
                mark(*other);
            }
        }
    }

    double value(const Usage & usage, float, bool) const override { return usage.mark; }

    void mark(Usage & usage) { usage.mark = (double) phase + order(rng); }

    uint64_t                         phase = 1;
    std::vector<Usage *>             latest; // that were used at the same time
    std::minstd_rand                 rng;
    std::uniform_real_distribution<> order{ 0, 0.5 };
};

// What a pass of its layer did not use (stale) goes before what the last one used, and of either what belongs to the
// layer whose turn comes last: layers are passed in a cycle (SpecMD, Least-Stale).
class LeastStale : public Lru {
    double value(const Usage & usage, float, bool fresh) const override {
        constexpr double FRESH = 1e6, OLDER = 1e-12; // within a layer, the least recently used first
        return (fresh ? FRESH : 1) + OLDER * (double) usage.last_use;
    }

    bool counts_turns() const override { return true; }
};

// What its Learner says: a value, or the logarithm of uses. What was asked for by name was not learnt from: it counts
// as much as can be until it is.
class Learned : public Lru {
public:
    Learned(double most, bool turns, double times, double more) : most(most), turns(turns), times(times), more(more) {}

    void used(Usage & usage, uint64_t now) override {
        usage.last_use = now;
        usage.learned  = most;
    }

    double value(const Usage & usage, float, bool) const override { return usage.learned; }

    double settled(double value) const override { return times * value + more; }

    bool by_recency() const override { return false; }

    bool counts_turns() const override { return turns; }

private:
    double most;
    bool   turns;
    double times, more; // of what is there
};

// What is needed last goes first: the bound of what a policy can do on demand.
class Belady : public Lru {
    double value(const Usage & usage, float, bool) const override { return -(double) usage.next_use; }

    bool by_recency() const override { return false; }
};

} // namespace

std::unique_ptr<EvictionPolicy> make_policy(pyorch_policy policy, int n_moe_layers) {
    const double half_life = HEAT_HALF_LIFE_TOKENS * std::max(1, n_moe_layers);
    switch (policy) {
    case PYORCH_LFU: return std::make_unique<Lfu>(half_life);
    case PYORCH_FINEMOE: return std::make_unique<FineMoe>(half_life);
    case PYORCH_BELADY: return std::make_unique<Belady>();
    case PYORCH_LEARNED: return std::make_unique<Learned>(1, true, 4, 0);
    case PYORCH_BANDIT: return std::make_unique<Learned>(std::numeric_limits<double>::max() / 2, false, 1, 1);
    case PYORCH_LEAST_STALE: return std::make_unique<LeastStale>();
    case PYORCH_FIFO: return std::make_unique<Fifo>();
    case PYORCH_MARKING: return std::make_unique<Marking>();
    default: return std::make_unique<Lru>();
    }
}

std::unique_ptr<Learner> make_learner(pyorch_policy policy, const LearnerSizes & sizes) {
    switch (policy) {
    case PYORCH_LEARNED: return std::make_unique<LearnedValue>(sizes.n_experts, sizes.n_used);
    case PYORCH_BANDIT: return std::make_unique<DecayBandit>(sizes.n_experts, sizes.slot_bytes);
    default: return nullptr;
    }
}

double fading_use(double heat, double fading) { return std::log2(std::exp2(heat - fading) + 1) + fading; }

} // namespace pyorch
