// io_uring for reads: requests and results pass through memory shared with the kernel. Three system calls, called by
// number: no library is needed to build or to run this.
//
// One thread queues, submits and takes results; the functions are not thread-safe. Without the kernel's header, or with
// an old one, Ring::open always returns null.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

class Ring {
public:
    struct Read {
        int      file; // a descriptor, or its index if files are registered
        uint64_t offset;
        char *   buf;
        uint32_t size;
        int      buffer;    // the registered buffer around buf, -1: none
        bool     may_block; // a thread of the kernel does it: for a read that would block the submitting thread
    };

    struct Result {
        uint64_t tag;
        int32_t  value; // bytes read, or a negative errno
    };

    // depth: requests under way at once. Null, with errno, if the kernel has no io_uring, or a sandbox forbids it.
    static std::unique_ptr<Ring> open(unsigned depth);
    ~Ring();

    Ring(const Ring &)             = delete;
    Ring & operator=(const Ring &) = delete;

    // Registers descriptors; requests then give an index. False: they give descriptors.
    bool register_files(const std::vector<int> & files);

    // Reserves numbers 0 to n - 1 for buffers; none is registered yet. False if the kernel cannot.
    bool reserve_buffers(unsigned n);

    // Registers the memory of a buffer once, rather than for each read; replaces the buffer of that number. False if
    // the limit on locked memory, or the kernel, forbids it: the number is free then. memory null, and no bytes: only
    // unregisters. REQUIRES: no read into the old buffer is under way.
    bool set_buffer(unsigned number, void * memory, size_t bytes);

    // REQUIRES: fewer than depth requests are queued or under way.
    void queue(const Read & read, uint64_t tag);

    // Asks for a result when a descriptor can be read from.
    void queue_poll(int file, uint64_t tag);

    // Submits the queued requests. False if the kernel refuses.
    bool submit();

    // The same, and sleeps until a result comes. The result of a refused request is the reason.
    void submit_and_wait();

    // False if no result has come.
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
    unsigned            queued            = 0; // requests, since the begin
    unsigned            given             = 0; // submitted requests
    bool                has_files         = false;
    std::vector<Result> refused;

    // Pointers into that memory.
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
