// The order in which a token's absent experts are treated, and its slots that keep the router's choice.

#pragma once

#include "pyorch.h"

#include <cstdint>
#include <vector>

namespace pyorch {

class SlotOrder {
public:
    // max_weight: the least weight of a sacred slot.
    SlotOrder(const pyorch_substitution & settings, double max_weight, int n_used);

    // Returns all slots of a token with these weights [n_used], in the order of treatment.
    const std::vector<int> & of(const float * weights);

    // Whether a slot is never replaced or omitted: it is heavy, or among the token's heaviest.
    bool is_sacred(int slot) const { return sacred[slot] != 0; }

private:
    const pyorch_substitution & settings;
    const double                max_weight;
    std::vector<int>            order;
    std::vector<int>            by_weight;
    std::vector<uint8_t>        sacred;
};

} // namespace pyorch
