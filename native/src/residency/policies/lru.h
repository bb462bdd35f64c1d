// The least recently used expert goes first.

#pragma once

#include "residency/policies/policy.h"

namespace pyorch {

class Lru : public EvictionPolicy {
public:
    void used(Usage & usage, uint64_t now) override { usage.last_use = now; }

    double value(const Usage & usage, float, bool) const override { return (double) usage.last_use; }

    bool by_recency() const override { return true; }
};

} // namespace pyorch
