#include "routing/graph_needs.h"

#include "routing/device_tier.h"

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
        const unsigned seen = routing.prefetcher.needs();
        needs |= GRAPH_WEIGHTS;
        if (seen & NEEDS_PROBS) {
            needs |= GRAPH_PROBS;
        }
        if (seen & NEEDS_RESIDUALS) {
            needs |= GRAPH_RESIDUALS;
        }
    }
    return needs;
}

} // namespace pyorch
