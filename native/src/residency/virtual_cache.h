// A cache of which everything is counted and nothing is there: it says which experts would be resident, where that must
// not depend on how fast this machine reads and computes.

#pragma once

#include "residency/table.h"

#include <cstdint>
#include <vector>

namespace pyorch {

class VirtualCache {
public:
    virtual ~VirtualCache() = default;

    // A layer comes. resident, loading: [n_expert] each, nonzero for the experts that are there, and on their way, by
    // now.
    virtual void look(int layer, std::vector<uint8_t> & resident, std::vector<uint8_t> & loading) = 0;

    // It asks for what it needs, waits for that, and computes. deferred: as of Table::defer.
    virtual void pass(const void * context, int layer, const Demand & demand, const std::vector<int> & deferred) = 0;

    virtual double bytes_per_second() const = 0; // of its disk
};

} // namespace pyorch
