#include "banks/device_pools.h"

#include <algorithm>

namespace pyorch {

bool alike(const MoeLayer & a, const MoeLayer & b) {
    const auto same = [](const ExpertTensor & x, const ExpertTensor & y) {
        return x.role == y.role && x.type == y.type && x.n_in == y.n_in && x.n_out == y.n_out;
    };
    return std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(), same);
}

uint64_t largest_matrix(const MoeLayer & layer) {
    uint64_t bytes = 0;
    for (const auto & tensor : layer.tensors) {
        bytes = std::max(bytes, tensor.stride);
    }
    return bytes;
}

std::vector<DevicePool> form_device_pools(const ModelMap & map, double share, std::vector<int> & pool_of) {
    std::vector<DevicePool> pools;
    pool_of.clear();
    for (int i = 0; i < (int) map.layers.size(); ++i) {
        const MoeLayer & layer = map.layers[i];
        const auto       slots = (uint64_t) (share * layer.n_expert);
        // The newest pool of its kind that has room.
        auto pool = std::find_if(pools.rbegin(), pools.rend(), [&](const DevicePool & p) {
            return alike(map.layers[p.layers.front()], layer) &&
                (p.n_slots + slots) * largest_matrix(layer) <= DevicePool::MAX_TENSOR_BYTES;
        });
        if (pool == pools.rend()) {
            pools.push_back({ {}, 0, layer.expert_bytes() });
            pool = pools.rbegin();
        }
        pool->layers.push_back(i);
        pool->n_experts += layer.n_expert;
        pool->n_slots = (int) std::min<double>(pool->n_experts, share * pool->n_experts);
        pool_of.push_back((int) (pools.rend() - pool) - 1);
    }
    return pools;
}

int n_device_areas(uint64_t budget, uint64_t area_bytes) {
    constexpr int MOST        = 2;
    constexpr int LEAST_SHARE = 3; // of the memory, one part in so many
    return (int) std::min<uint64_t>(MOST, budget / (LEAST_SHARE * area_bytes));
}

} // namespace pyorch
