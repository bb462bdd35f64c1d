// io_uring, as far as reads need it: requests go to the kernel through memory that it shares with the process, and so
// do their results. Three system calls, by their numbers: no library is needed to build or to run this.
//
// One thread queues, submits and takes results; the functions are not thread-safe. Without the kernel's header, or an
// old one, Ring::open always returns null.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

class Ring {
public:
    struct Read {
        int      file; // a descriptor, or its index where files are registered
        uint64_t offset;
        char *   buf;
        uint32_t size;
        int      buffer;    // the registered buffer that buf lies in, -1: none
        bool     may_block; // a thread of the kernel waits for it: for a read that would stop who starts it
    };

    struct Result {
        uint64_t tag;
        int32_t  value; // bytes read, or a negative errno
    };

    // For so many requests under way at once. Null, with errno, where the kernel has no io_uring, or a sandbox forbids
    // it.
    static std::unique_ptr<Ring> open(unsigned depth);
    ~Ring();

    Ring(const Ring &)             = delete;
    Ring & operator=(const Ring &) = delete;

    // Descriptors, which requests then name by index. False: they name them by number.
    bool register_files(const std::vector<int> & files);

    // Numbers 0 to n - 1 for buffers, none of which is registered yet. False where the kernel cannot.
    bool reserve_buffers(unsigned n);

    // Takes hold of the memory of a buffer once, instead of for each read; replaces what had that number. False where
    // the limit on locked memory, or the kernel, forbids it: the number is free then. memory null, and no bytes: only
    // lets go of what had it. REQUIRES: no read into that is under way.
    bool set_buffer(unsigned number, void * memory, size_t bytes);

    // REQUIRES: fewer than depth are queued or under way.
    void queue(const Read & read, uint64_t tag);

    // A result comes once a descriptor can be read from.
    void queue_poll(int file, uint64_t tag);

    // Gives the kernel what is queued. False where it does not take it.
    bool submit();

    // The same, and sleeps until there is a result. What the kernel refuses gets the reason as its result.
    void submit_and_wait();

    // False while there is none.
    bool take(Result & result);

private:
    Ring() = default;

    int                 fd                = -1;
    void *              submissions       = nullptr; // shared with the kernel
    void *              completions       = nullptr;
    void *              entries           = nullptr;
    size_t              submissions_bytes = 0;
    size_t              completions_bytes = 0;
    size_t              entries_bytes     = 0;
    unsigned            queued            = 0; // requests that ever were
    unsigned            given             = 0; // of them, to the kernel
    bool                has_files         = false;
    std::vector<Result> refused;

    // In that memory.
    unsigned * tail         = nullptr;
    unsigned * order        = nullptr;
    unsigned   mask         = 0;
    unsigned * results_head = nullptr;
    unsigned * results_tail = nullptr;
    void *     results      = nullptr;
    unsigned   results_mask = 0;

    void * next_entry();
};

} // namespace pyorch
