// What is needed last goes first.

#pragma once

#include "residency/policies/lru.h"

namespace pyorch {

// The bound of what a policy can do on demand.
class Belady : public Lru {
public:
    double value(const Usage & usage, float, bool) const override { return -(double) usage.next_use; }

    bool by_recency() const override { return false; }
};

} // namespace pyorch
