// Readers end the requests of a loader: threads apart from the compute threads, or a replay in its simulated time.
//
// A reader takes requests with Loader::next or try_next, as many at once as it likes. It ends each with read and
// decode, or with finish, which does both.

#pragma once

#include "loading/loader.h"

#include <memory>
#include <thread>
#include <vector>

namespace pyorch {

class Reader {
public:
    // A loader has one reader at a time.
    explicit Reader(Loader & loader) : loader(loader) { attach(this); }

    virtual ~Reader() { attach(nullptr); }

    Reader(const Reader &)             = delete;
    Reader & operator=(const Reader &) = delete;

    // Called by a thread that needs the memory of running reads: releases the loader's mutex until something may have
    // changed.
    virtual void wait(Mutex & mutex, CondVar & changed) REQUIRES(mutex) { changed.wait(mutex); }

    // Called when new requests may wait, with the loader's mutex or without it. A thread in Loader::next is woken
    // anyway. Never called after attach(nullptr) has returned.
    virtual void wake() {}

protected:
    Loader & loader;

    void attach(Reader * reader) {
        MutexLock lock(loader.mutex);
        MutexLock telling(loader.waking);
        loader.reader = reader;
    }
};

// Threads for decode stages that compute, if the reader's thread must not decode. Waiting threads decode, too.
class DecodeThreads {
public:
    DecodeThreads(Loader & loader, int n_threads);
    ~DecodeThreads(); // decodes the rest first

private:
    Loader &                 loader;
    std::vector<std::thread> threads;
};

// Threads that read, one request at a time each.
class ReaderThreads : public Reader {
public:
    ReaderThreads(Loader & loader, int n_threads);
    ~ReaderThreads() override; // ends the running requests, and leaves the others

private:
    std::vector<std::thread> threads;
};

// Number of threads by default: reading ones, or decoding ones for a reader.
int default_threads();

// The kind of reader of a loader, and the size of its reads.
struct ReadPlan {
    bool     io_uring; // otherwise threads
    int      depth;    // requests under way at once: of the ring, or one for each thread
    uint64_t bytes;    // of a request, at most
};

// As configured, or as suits most disks. Throws Failure if io_uring is configured and the system has none.
ReadPlan plan_reads(const pyorch_config & config);

// Uses threads if the plan's ring cannot be opened after all.
std::unique_ptr<Reader> make_reader(Loader & loader, const ReadPlan & plan);

} // namespace pyorch
