// What the last token did not use goes first.

#pragma once

#include "residency/policies/lru.h"

namespace pyorch {

// What a pass of its layer did not use (stale) goes before what the last one used, and of either what belongs to the
// layer whose turn comes last: layers are passed in a cycle (SpecMD, Least-Stale).
class LeastStale : public Lru {
public:
    double value(const Usage & usage, float, bool fresh) const override {
        constexpr double FRESH = 1e6, OLDER = 1e-12; // within a layer, the least recently used first
        return (fresh ? FRESH : 1) + OLDER * (double) usage.last_use;
    }

    bool counts_turns() const override { return true; }
};

} // namespace pyorch
