// DeviceLink: the way of experts from host memory to a device.
//
// Plain: ggml's synchronous call.
//
// Staged: matrices are cut into pieces that pass through *lanes*. A lane is some page-locked host memory, which the
// device reads by itself, and a queue on the device: an instance of its backend. So several pieces are sent at once,
// while others are copied into their lanes and the device computes.
//
// Staged needs a backend that copies asynchronously from page-locked memory, with a queue for each instance: ggml's
// CUDA (and so ROCm and MUSA). Vulkan's instances share one queue with all computing, so a copy waits for the computing
// before it: its synchronous call is better, and so is that of other backends, as far as we know. PYORCH_UPLOADS=staged
// or plain in the environment overrides this.
//
// Locked: bytes in host memory that the device reads by itself (page_locks.h) pass no lane.

#pragma once

#include "banks/page_locks.h"
#include "base/mutex.h"

#include "ggml-cpp.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

// Whether kernels of the device can read page-locked host memory like their own.
bool reads_host_memory(ggml_backend_dev_t device);

class DeviceLink {
public:
    // largest: bytes of a matrix; most sends have this size. locks: of the memory that it sends; null: none. They must
    // outlive it.
    DeviceLink(ggml_backend_dev_t device, uint64_t largest, PageLocks * locks = nullptr);
    ~DeviceLink();

    DeviceLink(const DeviceLink &)             = delete;
    DeviceLink & operator=(const DeviceLink &) = delete;

    // Sends bytes[n] to `to`, from an offset; they are there after wait(). True: the device reads them where they lie,
    // so they must stay until then; false: they are free when it returns. Any number of threads.
    bool send(ggml_tensor * to, uint64_t offset, const char * bytes, uint64_t n);

    // Copies on the device; the copy is there after wait(). Any number of threads.
    void copy(ggml_tensor * from, ggml_tensor * to);

    // Waits until all that was sent before is there.
    void wait();

private:
    struct Lane {
        ggml_backend_ptr        queue;
        ggml_backend_event_ptr  sent; // null: the device has none
        ggml_backend_buffer_ptr piece;
        Mutex                   mutex;
        bool                    under_way GUARDED_BY(mutex) = false;
    };

    uint64_t                           piece_bytes;
    PageLocks * const                  locks;
    std::vector<std::unique_ptr<Lane>> lanes; // none: plain
    std::atomic<unsigned>              next{ 0 };

    static void begin(Lane & lane, ggml_tensor * to, uint64_t offset, const char * bytes, uint64_t n)
        REQUIRES(lane.mutex);
    static void finish(Lane & lane) REQUIRES(lane.mutex);
};

} // namespace pyorch
