// How the slots of a device are shared by layers.
//
// Layers whose experts are alike share their slots, as many layers as a tensor has room for: together they are a
// *pool*. So a layer has as many slots as its experts are worth, and none lies idle.

#pragma once

#include "model/model_map.h"

#include <vector>

namespace pyorch {

struct DevicePool {
    // Of a tensor with slots of several layers: some backends count elements with 32 bits, others have no larger
    // buffers. Slots of one layer are never more than the model's own tensor has experts, with which a backend has to
    // cope.
    static constexpr uint64_t MAX_TENSOR_BYTES = 2ull << 30;

    std::vector<int> layers;    // indices into those with experts, ascending
    int              n_experts; // of all of them
    uint64_t         slot_bytes;
    int              n_slots = 0;
};

// Whether experts of two layers have the same matrices.
bool alike(const MoeLayer & a, const MoeLayer & b);

// Bytes of the largest matrix of an expert.
uint64_t largest_matrix(const MoeLayer & layer);

// share: of the experts that there are slots for. pool_of: becomes the index of each layer's pool.
std::vector<DevicePool> form_device_pools(const ModelMap & map, double share, std::vector<int> & pool_of);

// How many areas of so many bytes each a budget has room for beside slots: two, or one, or none where they would take
// more than a third of it.
int n_device_areas(uint64_t budget, uint64_t area_bytes);

} // namespace pyorch
