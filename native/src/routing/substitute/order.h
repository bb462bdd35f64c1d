// In which order the absent experts of a token are treated, and which of its slots stay as the router chose them.

#pragma once

#include "pyorch.h"

#include <cstdint>
#include <vector>

namespace pyorch {

class SlotOrder {
public:
    // max_weight: from which on a slot is sacred.
    SlotOrder(const pyorch_substitution & settings, double max_weight, int n_used);

    // Of a token whose slots have these weights [n_used]: all slots, the first to be treated first.
    const std::vector<int> & of(const float * weights);

    // Heavy, or among the token's heaviest: it is never replaced nor left out.
    bool is_sacred(int slot) const { return sacred[slot] != 0; }

private:
    const pyorch_substitution & settings;
    const double                max_weight;
    std::vector<int>            order;
    std::vector<int>            by_weight;
    std::vector<uint8_t>        sacred;
};

} // namespace pyorch
