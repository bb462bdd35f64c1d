// A memory of experts, as every part sees it that does not fill it.

#pragma once

#include "base/status.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pyorch {

// Host memory (Table), devices (DeviceTier) and other servers (RemoteBank) are tiers: the API asks all of them in turn. A
// new tier is a class. A tier that evicts has a Seats (seats.h); a tier that only has experts implements mark().
//
// Layers are indices into the layers with experts. Any thread may call.
class Tier {
public:
    virtual ~Tier() = default;

    // mask[n_expert]: becomes 1 for each expert of the layer that the tier has now.
    virtual void mark(int layer, std::vector<uint8_t> & mask) = 0;

    // Of a layer's experts `min` stay while there are so many, and at most `max` come. Throws Failure.
    virtual void set_limits(int, int, int) {
        throw Failure(PYORCH_INVALID, "experts of a layer have no limits in this memory");
    }

    // Evicts by another policy from now on.
    virtual void set_policy(pyorch_policy) {}

    // Adds what was counted of a layer, and what the tier has of it now; -1: of all layers.
    virtual void add_stats(int, pyorch_stats &) {}

    // Zeroes what was counted.
    virtual void reset_stats() {}
};

// What a memory that may refuse experts does about those of a layer.
struct DevicePass {
    std::vector<int> slots   = {}; // by expert: the slot that has it, which is held; -1: none does. Empty: of no expert
    std::vector<int> uploads = {}; // come before the layer is computed, and are computed there
    std::vector<int> behind  = {}; // come while it is computed, and serve the next time
    std::vector<int> guests  = {}; // that it computes with, and that do not stay: ascending

    bool computes(int expert) const { return !slots.empty() && slots[expert] >= 0; }
    bool keeps(int expert) const {
        return computes(expert) && !std::binary_search(guests.begin(), guests.end(), expert);
    }
};

} // namespace pyorch
