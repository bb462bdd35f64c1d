// Locks pages of host memory, so that a device reads them directly, without a thread that copies.
//
// The host bank locks the memory that it opens, in large pieces. It unlocks a piece before pages of the piece go back
// to the system, and never locks it again. So if memory moves between experts of several sizes, more is copied.
// A device reads locked memory directly, piece by piece. After the system's limit for locked memory is reached, further
// memory takes the lanes of device/link.h. A locked piece has memory at once: for each size of experts, up to 32 MiB of
// the budget may be allocated before an expert uses it.
//
// Only backends that can register host memory support this: CUDA's.

#pragma once

#include "base/mutex.h"

#include "ggml-backend.h"

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace pyorch {

class PageLocks {
public:
    using Lock   = std::function<bool(char * begin, uint64_t bytes)>;
    using Unlock = std::function<void(char * begin)>;

    // Locks through the backend of the first device that supports it. Without such a device, nothing is ever locked.
    explicit PageLocks(const std::vector<ggml_backend_dev_t> & devices);
    PageLocks(Lock lock, Unlock unlock) : do_lock(std::move(lock)), do_unlock(std::move(unlock)) {}

    PageLocks(const PageLocks &)             = delete;
    PageLocks & operator=(const PageLocks &) = delete;

    // Locks whole pages. After the system has refused a piece, does nothing.
    void lock(char * begin, uint64_t bytes);

    // Unlocks all pieces with some of these bytes. Waits until no device reads them.
    void unlock(const char * begin, uint64_t bytes);

    // Calls use(begin, n) for the bytes in each piece, which starts a device's read. The bytes stay locked until the
    // function of on_unlock() has returned. Returns false without a call if some of the bytes are not locked.
    bool read(const char * bytes, uint64_t n, const std::function<void(const char * begin, uint64_t n)> & use) const;

    // Sets a function that waits for all reads of this reader, to call before a piece is unlocked. Empty: removes it.
    void on_unlock(const void * reader, std::function<void()> f);

private:
    mutable SharedMutex        mutex;
    Lock                       do_lock GUARDED_BY(mutex); // empty: not supported
    Unlock                     do_unlock;
    std::map<char *, uint64_t> pieces GUARDED_BY(mutex); // bytes by begin

    std::map<const void *, std::function<void()>> settles GUARDED_BY(mutex); // by reader
};

} // namespace pyorch
