#include "banks/device_landings.h"

#include "ggml-alloc.h"

#include <algorithm>

namespace pyorch {

void DeviceLandings::set_limit(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    limit = bytes;
}

ggml_tensor * DeviceLandings::take(int64_t n) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  free = std::find_if(
        landings.begin(), landings.end(), [&](const Landing & l) { return !l.taken && l.tensor->ne[0] >= n; });
    if (free != landings.end()) {
        free->taken = true;
        return free->tensor;
    }
    Landing made = {};
    made.ctx.reset(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
    made.tensor = ggml_new_tensor_1d(made.ctx.get(), GGML_TYPE_F32, n);
    ggml_set_name(made.tensor, "pyorch_landing");
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    if (used_bytes + ggml_backend_buft_get_alloc_size(type, made.tensor) > limit) {
        return nullptr;
    }
    made.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(made.ctx.get(), type));
    if (!made.buffer) {
        return nullptr;
    }
    used_bytes += ggml_backend_buffer_get_size(made.buffer.get());
    ggml_backend_buffer_clear(made.buffer.get(), 0);
    ggml_backend_buffer_set_usage(made.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    made.taken = true;
    landings.push_back(std::move(made));
    return landings.back().tensor;
}

void DeviceLandings::give_back(ggml_tensor * landing) {
    std::lock_guard<std::mutex> lock(mutex);
    for (Landing & l : landings) {
        l.taken = l.taken && l.tensor != landing;
    }
}

} // namespace pyorch
