// What is counted, of a layer or of a memory: pyorch_stats.

#pragma once

#include "pyorch.h"

namespace pyorch {

// Adds each number of `more`, but for the size of the struct: they are all alike.
inline void add(pyorch_stats & sum, const pyorch_stats & more) {
    static_assert(sizeof(pyorch_stats) % sizeof(uint64_t) == 0, "a counter is a uint64_t");
    auto *       to   = (uint64_t *) &sum;
    const auto * from = (const uint64_t *) &more;
    for (size_t i = 1; i < sizeof(pyorch_stats) / sizeof(uint64_t); ++i) {
        to[i] += from[i];
    }
}

} // namespace pyorch
