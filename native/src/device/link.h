// The way of experts from host memory to a device.
//
// Plain: ggml's synchronous call.
//
// Staged: matrices are cut into pieces, and those pass through *lanes*. A lane is some page-locked host memory, which
// the device reads by itself, and a queue of its own on the device: an instance of its backend. So several pieces are
// under way at once, while others are copied into their lanes and the device computes.
//
// Devices are staged whose backends copy asynchronously from page-locked memory and give each instance a queue: those
// of ggml's CUDA, which is ROCm's and MUSA's, too. Instances of Vulkan share one queue with all that computes, in which
// a copy waits for what was computed before and is waited for behind: its synchronous call is better. So is that of
// others, as far as we know. PYORCH_UPLOADS=staged, or plain, in the environment says it for any device that can.
//
// Locked: what lies in host memory that the device reads by itself (page_locks.h) passes no lane's memory.

#pragma once

#include "banks/page_locks.h"
#include "base/mutex.h"

#include "ggml-cpp.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

// Whether kernels of the device can read page-locked host memory as if it was their own.
bool reads_host_memory(ggml_backend_dev_t device);

class DeviceLink {
public:
    // largest: bytes of a matrix, of which most will be sent. locks: of the memory that it sends, null: none; they
    // outlive it.
    DeviceLink(ggml_backend_dev_t device, uint64_t largest, PageLocks * locks = nullptr);
    ~DeviceLink();

    DeviceLink(const DeviceLink &)             = delete;
    DeviceLink & operator=(const DeviceLink &) = delete;

    // bytes[n] go to `to`, from an offset on, and are there after wait(). True: the device reads them where they lie,
    // and they must stay until then; false: they are free when it returns. Any number of threads.
    bool send(ggml_tensor * to, uint64_t offset, const char * bytes, uint64_t n);

    // What the device has goes elsewhere on it, and is there after wait(). Any number of threads.
    void copy(ggml_tensor * from, ggml_tensor * to);

    // Until all that was sent before is there.
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
