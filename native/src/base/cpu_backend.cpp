#include "base/cpu_backend.h"

#include "base/status.h"

#include "ggml.h"

#include <cstring>
#include <type_traits>

namespace pyorch {
namespace {

// Loads the backends next to libggml. The choice is not logged, since no log level is set yet.
void load_backends() {
    ggml_log_callback log  = nullptr;
    void *            user = nullptr;
    ggml_log_get(&log, &user);
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    ggml_backend_load_all();
    ggml_log_set(log, user);
}

CpuBackend find() {
    CpuBackend found = {};
    found.device     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!found.device) {
        load_backends();
        found.device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    if (found.device) {
        found.registration = ggml_backend_dev_backend_reg(found.device);
        const auto take    = [&](auto & function, const char * name) {
            function = (std::decay_t<decltype(function)>) ggml_backend_reg_get_proc_address(found.registration, name);
        };
        take(found.set_expert_hooks, "ggml_cpu_set_expert_hooks");
        take(found.repack, "ggml_cpu_repack");
        take(found.type_traits, "ggml_get_type_traits_cpu");
        take(found.set_n_threads, "ggml_backend_set_n_threads");
        take(found.features, "ggml_backend_get_features");
    }
    return found;
}

} // namespace

const CpuBackend & cpu_backend() {
    static const CpuBackend found = find();
    if (!found.device) {
        throw Failure(PYORCH_IO, "ggml found no CPU backend beside its library: install pyorch again");
    }
    if (!found.set_expert_hooks || !found.repack || !found.type_traits || !found.set_n_threads || !found.features) {
        throw Failure(
            PYORCH_IO, "the CPU backend of this process is not pyorch's: import pyorch before whatever loaded it");
    }
    return found;
}

ggml_backend_buffer_type_t cpu_buffers(bool repacked) {
    if (!repacked) {
        return ggml_backend_dev_buffer_type(cpu_backend().device);
    }
    const auto extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        cpu_backend().registration, "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * type = extra ? extra(cpu_backend().device) : nullptr; type && *type; ++type) {
        if (!strcmp(ggml_backend_buft_name(*type), "CPU_REPACK")) {
            return *type;
        }
    }
    return nullptr;
}

} // namespace pyorch
