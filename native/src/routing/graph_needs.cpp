#include "routing/graph_needs.h"

#include "routing/device_tier.h"

#include <utility>

namespace pyorch {

unsigned graph_needs(const Routing & routing) {
    const bool changes = routing.substitutions.active() || routing.remote.active() || routing.calibration.active() ||
        routing.speculation.mode() != PYORCH_SPECULATE_NONE;
    if (!routing.device || routing.observer.active || changes) {
        return GRAPH_ALL;
    }
    if (routing.device->has_room_for_all()) { // each expert comes once, and nothing is gained by a forecast
        return 0;
    }
    unsigned needs = GRAPH_PROCESSOR;
    if (routing.prefetcher.active()) {
        constexpr std::pair<unsigned, unsigned> WANTED[] = {
            { NEEDS_PROBS, GRAPH_PROBS },
            { NEEDS_INPUTS, GRAPH_INPUTS },
            { NEEDS_RESIDUALS, GRAPH_RESIDUALS },
        };
        needs |= GRAPH_WEIGHTS;
        for (const auto & [by_predictor, by_graph] : WANTED) {
            if (routing.prefetcher.needs() & by_predictor) {
                needs |= by_graph;
            }
        }
    }
    return needs;
}

} // namespace pyorch
