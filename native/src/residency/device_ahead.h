// Guests: experts that come to slots of a device because a forecast names them (DeviceTable::order).
//
// What they cost is the slots that are kept for them, in which demand would have had others. Whether it does, is not
// guessed: a table without guests is played the same layers. As long as the one with guests has had no fewer hits than
// that, but for LOSS, it keeps its slots; else it gives them up and tries again after a pause, each four times as long
// as the one before. So over n layers guests cost at most some LOSS log4(n) hits, whatever is forecast. Layers of
// prompts do not count: nothing is forecast for them. Both have the same values (what a policy notes of experts that
// come and go, as fifo and marking do, is noted of the table with guests).
//
// What they cost the link, is an upload for each: of forecasts whose like was wrong more often than the predictor is
// asked for, nothing comes. That is counted for all that was absent, whether it came or not, so that it may come again.
//
// None of this depends on time: what was ordered for a layer follows from forecasts and passes.

#pragma once

#include "residency/device_table.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace pyorch {

struct DeviceTable::Ahead {
    struct Orders {
        std::vector<ForecastExpert> noted;  // absent when they were forecast
        std::vector<int>            guests; // of them
    };

    int                                            n; // guests of a layer
    std::map<std::pair<const void *, int>, Orders> orders;
    std::vector<std::vector<Rate>>                 came_true; // by layer, then distance and rank
    DeviceTable                                    without;
    int                                            at_layer = -1; // where it is
    std::vector<int>                               held     = {}; // what it holds there
    std::vector<std::vector<int>>                  coming;        // to it, by layer
    int64_t                                        gained = 0;    // hits
    bool                                           keeps  = true;
    uint64_t                                       pause  = 0; // in layers
    uint64_t                                       until  = 0; // the pause lasts

    Rate & rate(int layer, const ForecastExpert & named, int n_expert) {
        std::vector<Rate> & rates = came_true[layer];
        const size_t        at    = (size_t) std::max(named.distance - 1, 0) * n_expert + named.rank;
        rates.resize(std::max(rates.size(), at + 1), Rate(0.5));
        return rates[at];
    }
};

} // namespace pyorch
