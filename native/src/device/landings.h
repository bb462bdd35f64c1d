// Memory for data that goes from the processor to a device between the nodes of a graph, one piece for each context
// that computes: rows of the processor, and for one token also numbers.
//
// Pieces pass from context to context and are freed with the device's bank: a context that was aborted may end while
// the device still reads its piece.

#pragma once

#include "base/mutex.h"

#include "ggml-cpp.h"

#include <atomic>
#include <cstdint>
#include <list>

namespace pyorch {

class DeviceLandings {
public:
    struct Landing {
        ggml_tensor * rows; // [n] floats of the device; zero-copy: one, which names the device's buffer

        // Zero-copy: page-locked host memory that kernels read over the link, so that no thread waits for a copy. They
        // should read it once: the first kernel copies it on. null: memory of the device.
        float *   host      = nullptr;
        int32_t * numbers   = nullptr; // in the same memory, behind the rows
        int64_t   n_floats  = 0;
        int64_t   n_numbers = 0;

        bool holds(int64_t floats, int64_t numbers) const { return n_floats >= floats && n_numbers >= numbers; }

        // For zero-copy memory: a tensor that a graph takes for one of the device's.
        ggml_tensor * tensor(ggml_context * ctx, ggml_type type, const int64_t * ne, void * data) const;
    };

    explicit DeviceLandings(ggml_backend_dev_t device);

    // At most so many bytes of the device from now on; 0 before.
    void set_limit(uint64_t bytes);

    // A piece of at least n floats, until it is given back. null: no memory.
    const Landing * take(int64_t n);
    void            give_back(const Landing * landing);

    // The same in zero-copy memory, with room for n_numbers. null: the device's kernels cannot read there.
    const Landing * take_zero_copy(int64_t n, int64_t n_numbers);

    // Whether the device's kernels can.
    const bool reads_host;

    uint64_t used() const { return used_bytes; } // bytes of the device

private:
    struct Piece : Landing {
        ggml_context_ptr        ctx    = {};
        ggml_backend_buffer_ptr buffer = {};
        ggml_backend_buffer_ptr locked = {};
        bool                    taken  = true;
    };

    const ggml_backend_dev_t device;
    Mutex                    mutex;
    std::list<Piece>         pieces GUARDED_BY(mutex);
    uint64_t                 limit GUARDED_BY(mutex) = 0;
    std::atomic<uint64_t>    used_bytes{ 0 };

    Piece * find(int64_t n, int64_t n_numbers) REQUIRES(mutex);
    bool    allocate(Piece & piece, int64_t n) REQUIRES(mutex);
};

} // namespace pyorch
