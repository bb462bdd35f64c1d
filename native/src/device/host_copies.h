// Weights of a device once more in host memory: small ones that the processor computes with, too, such as biases of
// experts. A node is computed where its weights lie, and the way from one side to the other is long.

#pragma once

#include "base/mutex.h"

#include "ggml-cpp.h"

#include <map>
#include <memory>

namespace pyorch {

class HostCopies {
public:
    // The same in host memory, until forget(); itself where that is so already, or it has no numbers yet.
    ggml_tensor * of(ggml_tensor * weight);

    // The model that they are of is freed.
    void forget();

private:
    struct Copy {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor *           tensor;
    };

    Mutex                               mutex;
    std::map<const ggml_tensor *, Copy> copies GUARDED_BY(mutex);
};

} // namespace pyorch
