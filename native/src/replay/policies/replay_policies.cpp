#include "replay/policies/replay_policies.h"

#include "residency/policies/policy.h"

#include <algorithm>
#include <random>

namespace pyorch {
namespace {

// The optimum of policies on demand.
class Belady : public EvictionPolicy {
public:
    void used(Usage & usage, uint64_t now) override { usage.last_use = now; }

    double value(const Usage & usage, float) const override { return -(double) usage.next_use; }
};

class Fifo : public EvictionPolicy {
public:
    void used(Usage & usage, uint64_t now) override { usage.last_use = now; }

    double value(const Usage & usage, float) const override { return (double) usage.admitted; }

    bool by_recency() const override { return true; }
};

// Used experts are marked. If all are marked and one must be evicted, a new phase begins without marks. Among experts
// without a mark the choice is random (Fiat et al., Competitive Paging Algorithms, 1991). A mark is the number of its
// phase plus a fraction, which is the random order of eviction in the next phase. So a new phase changes no mark,
// except the running layer's experts: its uses are known before its evictions.
class Marking : public EvictionPolicy {
public:
    void used(Usage & usage, uint64_t now) override {
        usage.last_use = now;
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

    double value(const Usage & usage, float) const override { return usage.mark; }

    bool by_recency() const override { return true; }

private:
    void mark(Usage & usage) { usage.mark = (double) phase + order(rng); }

    uint64_t                         phase = 1;
    std::vector<Usage *>             latest; // used at the same time
    std::minstd_rand                 rng;
    std::uniform_real_distribution<> order{ 0, 0.5 };
};

Policies with_those_of_engines() {
    Policies list = {
        { PYORCH_BELADY, "belady", PYORCH_NEEDS_FUTURE, 0, "what is needed last goes first", make_policy<Belady> },
        { PYORCH_FIFO, "fifo", PYORCH_NEEDS_REPLAY, 0, "what came into memory first goes first", make_policy<Fifo> },
        { PYORCH_MARKING, "marking", PYORCH_NEEDS_REPLAY, 0, "at random, of what was not used since all others were",
            make_policy<Marking> },
    };
    list.insert(list.end(), policy_list().begin(), policy_list().end());
    std::sort(list.begin(), list.end(), [](const PolicyEntry & a, const PolicyEntry & b) { return a.kind < b.kind; });
    return list;
}

} // namespace

const Policies & replay_policies() {
    static const Policies list = with_those_of_engines();
    return list;
}

} // namespace pyorch
