// Guests: experts that come to slots of a device because a forecast names them (SlotPools::order).
//
// Guests cost slots, which are kept for them, and an upload each. The device counts how often forecasts of a layer, a
// distance and a rank came true. If these were wrong more often than the precision that the user asked for, no guest is
// uploaded for them. Forecasts of absent experts are counted even then, so that uploads can begin again.
//
// None of this depends on time: what was ordered for a layer follows from forecasts and passes.

#pragma once

#include "device/slot_pools.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace pyorch {

struct SlotPools::Ahead {
    struct Orders {
        std::vector<ForecastExpert> noted;  // absent when they were forecast
        std::vector<int>            guests; // of them
    };

    int                                            n; // guests of a layer
    std::map<std::pair<const void *, int>, Orders> orders;
    std::vector<std::vector<Rate>>                 came_true; // by layer, then distance and rank

    Rate & rate(int layer, const ForecastExpert & named, int n_expert) {
        std::vector<Rate> & rates = came_true[layer];
        const size_t        at    = (size_t) std::max(named.distance - 1, 0) * n_expert + named.rank;
        rates.resize(std::max(rates.size(), at + 1), Rate(0.5));
        return rates[at];
    }
};

} // namespace pyorch
