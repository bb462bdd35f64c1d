// ggml's CPU backend, from ggml's registry: a build may have several and loads the one for this processor, so libpyorch
// is linked with none of them.

#pragma once

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <memory>

namespace pyorch {

// The functions of llama.cpp, and the functions that patches/0001 adds to the backend.
struct CpuBackend {
    ggml_backend_reg_t                   registration;
    ggml_backend_dev_t                   device;
    decltype(&ggml_cpu_set_expert_hooks) set_expert_hooks;
    decltype(&ggml_cpu_repack)           repack;
    decltype(&ggml_get_type_traits_cpu)  type_traits;
    ggml_backend_set_n_threads_t         set_n_threads;
    ggml_backend_get_features_t          features;
};

// The same for the life of the process. Loads the backend if needed. Throws Failure if there is none, or it is not
// patched.
const CpuBackend & cpu_backend();

// Buffers for weights of one order; null if llama.cpp repacks nothing on this processor.
ggml_backend_buffer_type_t cpu_buffers(bool repacked);

struct GgmlFree {
    void operator()(ggml_context * context) const { ggml_free(context); }
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
    void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};
template <class T>
using GgmlOwned = std::unique_ptr<T, GgmlFree>;

} // namespace pyorch
