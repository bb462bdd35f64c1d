// At random, of what was not used since all others were.

#pragma once

#include "residency/policies/lru.h"

#include <random>

namespace pyorch {

// What is used is marked. When all are marked and one must go, a new phase begins without marks; of those without one
// any may go (Fiat et al., Competitive Paging Algorithms, 1991). A mark is the number of its phase and, behind the
// point, the order in which it goes in the next one, which is random: so none changes when a phase ends. But those of
// the running layer do: it is known what a layer uses before it is known what must go for it.
class Marking : public Lru {
public:
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

private:
    void mark(Usage & usage) { usage.mark = (double) phase + order(rng); }

    uint64_t                         phase = 1;
    std::vector<Usage *>             latest; // that were used at the same time
    std::minstd_rand                 rng;
    std::uniform_real_distribution<> order{ 0, 0.5 };
};

} // namespace pyorch
