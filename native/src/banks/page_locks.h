// Host memory that stays where it is, so that a device reads it by itself: no thread copies what goes there.
//
// The bank of host memory locks what it opens, a large piece at a time, and unlocks a piece before pages of it go back
// to the system: for good, so what moves between experts of several sizes is copied more and more. What is locked goes
// straight to the device, a part of it from each piece that it lies in; what comes after the system has locked as much
// as it may takes the lanes of device/link.h. A piece has its memory at once: of each size of experts, up to 32 MiB may
// be there that no expert has yet, as far as the budget goes for that size.
//
// Only backends of CUDA can: those that offer to register host memory.

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

    // As the backend of the first of these devices does it that can; without one nothing is ever locked.
    explicit PageLocks(const std::vector<ggml_backend_dev_t> & devices);
    PageLocks(Lock lock, Unlock unlock) : do_lock(std::move(lock)), do_unlock(std::move(unlock)) {}

    PageLocks(const PageLocks &)             = delete;
    PageLocks & operator=(const PageLocks &) = delete;

    // Whole pages. The first piece that the system refuses is the last one that is asked for.
    void lock(char * begin, uint64_t bytes);

    // All pieces that have bytes of these. Waits until no device reads there.
    void unlock(const char * begin, uint64_t bytes);

    // Calls use(begin, n), which has a device read these bytes, for the part in each piece, if all of them are locked:
    // they stay so until settle() of on_unlock() has returned. False: they are not, and nothing was called.
    bool read(const char * bytes, uint64_t n, const std::function<void(const char * begin, uint64_t n)> & use) const;

    // Called before a piece is unlocked: waits for all that use() has begun for this reader; empty: there is none more.
    void on_unlock(const void * reader, std::function<void()> f);

private:
    mutable SharedMutex        mutex;
    Lock                       do_lock GUARDED_BY(mutex); // none: it cannot
    Unlock                     do_unlock;
    std::map<char *, uint64_t> pieces GUARDED_BY(mutex); // bytes by begin

    std::map<const void *, std::function<void()>> settles GUARDED_BY(mutex); // by reader
};

} // namespace pyorch
