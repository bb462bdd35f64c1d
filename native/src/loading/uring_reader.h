// One thread that starts reads by io_uring and takes their results: the disk has as many requests as it needs, and the
// processor has little to do.
//
// Files are registered. The memory of a slot is registered when it is read into again, if the limit on locked memory
// allows it: otherwise each read pins its pages anew, which costs more than the rest of the read. At the first read the
// slot has no pages yet, and the kernel's threads allocate them. A slot that frees its memory is unregistered before
// the next read.
//
// The thread sleeps in one place, in the kernel, until a read ends or wake() rings: it writes to a descriptor that the
// kernel watches. A decode stage that computes runs on other threads.

#pragma once

#include "loading/readers.h"
#include "loading/ring.h"

#include <atomic>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

namespace pyorch {

class UringReader : public Reader {
public:
    // depth: requests under way at once, at least 1. Null without io_uring, or without a file of the source.
    static std::unique_ptr<UringReader> create(Loader & loader, int depth);

    ~UringReader() override; // ends the running requests, and leaves the others

    void wake() override;

private:
    struct UnderWay {
        ReadRequest request;
        uint64_t    done;
        int         buffer;
        bool        may_block;
        int         disk = 0; // the disk with the copy that is read
    };

    struct Buffer {
        unsigned number;
        uint64_t bytes; // registered
    };

    UringReader(Loader & loader, int depth, std::unique_ptr<Ring> ring, int bell);

    std::unique_ptr<Ring>              ring;
    const int                          bell; // that wake() rings
    bool                               registered_files = false;
    bool                               registers        = false; // the memory of slots
    std::unordered_map<char *, Buffer> buffers;                  // registered slots
    std::vector<unsigned>              unused;                   // numbers of buffers
    std::vector<char *>                given_up;
    std::vector<UnderWay>              under_way;    // [depth]
    std::vector<int>                   idle;         // indices into it
    uint64_t                           last_ns  = 0; // when a read last ended, or the first began
    uint64_t                           last_cpu = 0; // of this thread, then
    std::atomic<bool>                  asleep{ false };
    std::atomic<bool>                  ending{ false };
    std::unique_ptr<DecodeThreads>     decoders;
    std::thread                        thread;

    void run();
    void listen();
    bool start_one();
    void choose_disk(UnderWay & u);
    void start(UnderWay & u);
    int  buffer_of(const ReadRequest & request);
    void ended(UnderWay & u, int32_t value);
    void end(UnderWay & u, int64_t result);
    void hand_over(const ReadRequest & request);
};

} // namespace pyorch
