#include "banks/device_bank.h"

#include "base/notice.h"

#include "ggml-alloc.h"

#include <algorithm>
#include <chrono>

namespace pyorch {
namespace {

ggml_type type_of(const ExpertTensor & tensor) {
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        if (tensor.type == ggml_type_name((ggml_type) type)) {
            return (ggml_type) type;
        }
    }
    throw Failure(PYORCH_FORMAT,
        format("%s has a type that is not known: %s", tensor.name.c_str(), tensor.type.c_str()));
}

bool alike(const MoeLayer & a, const MoeLayer & b) {
    const auto same = [](const ExpertTensor & x, const ExpertTensor & y) {
        return x.role == y.role && x.type == y.type && x.n_in == y.n_in && x.n_out == y.n_out;
    };
    return std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(), same);
}

uint64_t largest_of(const MoeLayer & layer) {
    uint64_t bytes = 0;
    for (const auto & tensor : layer.tensors) {
        bytes = std::max(bytes, tensor.stride);
    }
    return bytes;
}

uint64_t clock_ns() {
    using namespace std::chrono;
    return (uint64_t) duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

} // namespace

DeviceBank::DeviceBank(const ModelMap & map, ggml_backend_dev_t device) : device(device), map(map) {}

// share: of the experts that there are slots for.
void DeviceBank::form_pools(double share) {
    pools.clear();
    pool_by_layer.clear();
    for (int i = 0; i < (int) map.layers.size(); ++i) {
        const MoeLayer & layer = map.layers[i];
        const auto       slots = (uint64_t) (share * layer.n_expert);
        // The newest pool of its kind that has room.
        auto pool = std::find_if(pools.rbegin(), pools.rend(), [&](const Pool & p) {
            return alike(map.layers[p.layers.front()], layer) &&
                (p.n_slots + slots) * largest_of(layer) <= MAX_TENSOR_BYTES;
        });
        if (pool == pools.rend()) {
            pools.push_back({ {}, 0, layer.expert_bytes() });
            pool = pools.rbegin();
        }
        pool->layers.push_back(i);
        pool->n_experts += layer.n_expert;
        pool->n_slots    = (int) std::min<double>(pool->n_experts, share * pool->n_experts);
        pool_by_layer.push_back((int) (pools.rend() - pool) - 1);
    }
}

// What they take on the device.
uint64_t DeviceBank::make_tensors() {
    size_t n_tensors = 0;
    for (const Pool & pool : pools) {
        n_tensors += map.layers[pool.layers.front()].tensors.size();
    }
    tensors.reset(ggml_init({ (n_tensors + 1) * ggml_tensor_overhead(), nullptr, true }));
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    const size_t alignment = ggml_backend_buft_get_alignment(type);
    uint64_t     bytes     = 0;
    for (Pool & pool : pools) {
        pool.roles.clear();
        for (const auto & tensor : map.layers[pool.layers.front()].tensors) {
            ggml_tensor * slots = nullptr;
            if (pool.n_slots > 0) {
                slots = ggml_new_tensor_3d(tensors.get(), type_of(tensor), tensor.n_in, tensor.n_out, pool.n_slots);
                ggml_format_name(slots, "pyorch_slots.%s", tensor.name.c_str());
                bytes += round_up(ggml_backend_buft_get_alloc_size(type, slots), alignment);
            }
            pool.roles.push_back(slots);
        }
    }
    return bytes;
}

void DeviceBank::allocate(uint64_t budget) {
    uint64_t all = 0;
    for (const auto & layer : map.layers) {
        all += layer.n_expert * layer.expert_bytes();
    }
    double         share   = std::min(1.0, (double) budget / (double) all);
    bool           refused = false;
    const uint64_t wanted  = std::min(budget, all);
    for (; share > 0; share = share * all < 1 ? 0 : share) {
        form_pools(share);
        const uint64_t bytes = make_tensors();
        if (bytes == 0) {
            break;
        }
        if (bytes > budget) { // what the device aligns to
            share *= std::min(0.999, (double) budget / (double) bytes);
            continue;
        }
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(tensors.get(), ggml_backend_dev_buffer_type(device)));
        if (buffer) {
            ggml_backend_buffer_clear(buffer.get(), 0); // rows that nobody wants are computed too: no trap lies in wait
            ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            used_bytes = ggml_backend_buffer_get_size(buffer.get());
            break;
        }
        refused = true;
        share  *= 0.75;
    }
    if (!buffer) {
        form_pools(0);
        make_tensors();
    }
    if (refused || (!buffer && budget > 0)) {
        notice(format("note: %s has no memory for %s of experts: %s is taken", ggml_backend_dev_name(device),
            mebibytes(wanted).c_str(), mebibytes(used_bytes).c_str()));
    }
}

void DeviceBank::upload(int layer, int slot, int role, const char * bytes) {
    ggml_tensor *  to    = slots(layer, role);
    const uint64_t begin = clock_ns();
    ggml_backend_tensor_set(to, bytes, slot * to->nb[2], to->nb[2]);
    uploading_ns += clock_ns() - begin;
    uploaded     += to->nb[2];
}

void DeviceBank::reset_counts() {
    uploaded     = 0;
    uploading_ns = 0;
}

} // namespace pyorch
