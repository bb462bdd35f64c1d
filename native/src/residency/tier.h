// A memory of experts, as those see it who do not fill it.

#pragma once

#include <algorithm>
#include <vector>

namespace pyorch {

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
