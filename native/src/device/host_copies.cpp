#include "device/host_copies.h"

#include "base/cpu_backend.h"
#include "base/status.h"

#include "ggml-alloc.h"

namespace pyorch {

ggml_tensor * HostCopies::of(ggml_tensor * weight) {
    if (!weight->data || !weight->buffer || ggml_backend_buffer_is_host(weight->buffer)) {
        return weight;
    }
    MutexLock  lock(mutex);
    const auto found = copies.find(weight);
    if (found != copies.end()) {
        return found->second.tensor;
    }
    Copy made = {};
    made.ctx.reset(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
    made.tensor = ggml_dup_tensor(made.ctx.get(), weight);
    ggml_set_name(made.tensor, ggml_get_name(weight));
    made.buffer.reset(
        ggml_backend_alloc_ctx_tensors_from_buft(made.ctx.get(), ggml_backend_dev_buffer_type(cpu_backend().device)));
    if (!made.buffer) {
        throw Failure(
            PYORCH_MEMORY, format("there is no memory for %s on the processor's side", ggml_get_name(weight)));
    }
    ggml_backend_buffer_set_usage(made.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_get(weight, made.tensor->data, 0, ggml_nbytes(weight));
    return (copies[weight] = std::move(made)).tensor;
}

void HostCopies::forget() {
    MutexLock lock(mutex);
    copies.clear();
}

} // namespace pyorch
