// What came into memory first goes first.

#pragma once

#include "residency/policies/lru.h"

namespace pyorch {

class Fifo : public Lru {
public:
    double value(const Usage & usage, float, bool) const override { return (double) usage.came; }
};

} // namespace pyorch
