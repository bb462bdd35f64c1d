// Memory of a device for rows that the processor computes, one for each context that computes.
//
// It goes from context to context and is freed with the device's bank: a context that was aborted may end while the
// device still works on what it was given.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace pyorch {

class DeviceLandings {
public:
    explicit DeviceLandings(ggml_backend_dev_t device) : device(device) {}

    // At most so many bytes from now on, 0 before.
    void set_limit(uint64_t bytes);

    // Of at least n floats, [n'], until it is given back. null: there is no memory.
    ggml_tensor * take(int64_t n);
    void          give_back(ggml_tensor * landing);

    uint64_t used() const { return used_bytes; } // of the device

private:
    struct Deleter {
        void operator()(ggml_context * ctx) const { ggml_free(ctx); }
        void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
    };
    struct Landing {
        std::unique_ptr<ggml_context, Deleter>                                 ctx;
        std::unique_ptr<std::remove_pointer_t<ggml_backend_buffer_t>, Deleter> buffer;
        ggml_tensor *                                                          tensor;
        bool                                                                   taken;
    };

    const ggml_backend_dev_t device;
    std::mutex               mutex;
    std::vector<Landing>     landings;
    uint64_t                 limit = 0;
    std::atomic<uint64_t>    used_bytes{ 0 };
};

} // namespace pyorch
