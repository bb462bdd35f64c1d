// What its Learner says goes first: of the policy learned (learned_value.h), and of others that learn.

#pragma once

#include "residency/policies/lru.h"

namespace pyorch {

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

} // namespace pyorch
