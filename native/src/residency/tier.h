// A memory of experts, as its users see it.

#pragma once

#include "base/status.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pyorch {

// Tiers are host memory (Table), devices (DeviceTier) and other servers (RemoteBank); pyorch_engine (engine.h) lists
// them. A new tier is a class. A tier that evicts has a Seats (seats.h); a tier that only holds experts implements
// mark().
//
// Layers are indices into the layers with experts. Any thread may call.
class Tier {
public:
    virtual ~Tier() = default;

    // mask[n_expert]: becomes 1 for each expert of the layer that the tier holds now.
    virtual void mark(int layer, std::vector<uint8_t> & mask) = 0;

    // Up to `min` experts of a layer stay once they have come, and at most `max` come. Throws Failure.
    virtual void set_limits(int, int, int) {
        throw Failure(PYORCH_INVALID, "experts of a layer have no limits in this memory");
    }

    // Changes the eviction policy.
    virtual void set_policy(pyorch_policy) {}

    // Adds the counts of a layer, and its present number of experts; -1: of all layers.
    virtual void add_stats(int, pyorch_stats &) {}

    // Sets the counts to zero.
    virtual void reset_stats() {}
};

// The decision of a memory that may refuse experts, for one layer.
struct DevicePass {
    std::vector<int> slots   = {}; // by expert: its slot, which is held; -1: none. Empty: no expert has one
    std::vector<int> uploads = {}; // come before the layer is computed, and are computed there
    std::vector<int> behind  = {}; // come while the layer is computed, for its next pass
    std::vector<int> ordered = {}; // take part in this computation only: ascending

    bool computes(int expert) const { return !slots.empty() && slots[expert] >= 0; }
    bool keeps(int expert) const {
        return computes(expert) && !std::binary_search(ordered.begin(), ordered.end(), expert);
    }
};

} // namespace pyorch
