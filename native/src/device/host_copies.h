// Copies in host memory of small weights of a device that the processor computes with, too, such as biases of experts.
// A node is computed where its weights lie, and the way between host and device is slow.

#pragma once

#include "base/mutex.h"

#include "ggml-cpp.h"

#include <map>
#include <memory>

namespace pyorch {

class HostCopies {
public:
    // The copy in host memory, until forget(). The weight itself if it is there already, or has no data yet.
    ggml_tensor * of(ggml_tensor * weight);

    // The model of the weights is freed.
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
