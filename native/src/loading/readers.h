// Who ends the requests of a loader: threads beside the compute threads, or a replay in its simulated time.
//
// A reader takes requests with Loader::next or try_next, as many at once as it likes, and ends each with read and
// decode, or with finish, which is both.

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

    // Called by who needs memory that reads under way hold: unlocks the loader's mutex until something may have
    // changed.
    virtual void wait(Mutex & mutex, CondVar & changed) REQUIRES(mutex) { changed.wait(mutex); }

    // Called when new requests may be there, with the loader's mutex or without it; who sleeps in Loader::next is woken
    // anyway. No longer called once attach(nullptr) has returned.
    virtual void wake() {}

protected:
    Loader & loader;

    void attach(Reader * reader) {
        MutexLock lock(loader.mutex);
        MutexLock telling(loader.waking);
        loader.reader = reader;
    }
};

// Threads for decode stages that compute, beside a reader whose thread must not, and beside those who wait for what is
// decoded.
class DecodeThreads {
public:
    DecodeThreads(Loader & loader, int n_threads);
    ~DecodeThreads(); // decodes what was left to them first

private:
    Loader &                 loader;
    std::vector<std::thread> threads;
};

// Threads that read, one request at a time each.
class ReaderThreads : public Reader {
public:
    ReaderThreads(Loader & loader, int n_threads);
    ~ReaderThreads() override; // ends the requests under way, leaves the rest

private:
    std::vector<std::thread> threads;
};

// Threads of an engine where nobody says how many: that read, or that decode beside a reader.
int default_threads();

// Which reader a loader gets, and how much it asks of the disk at once.
struct ReadPlan {
    bool     io_uring; // else threads
    int      depth;    // requests under way at once: of the ring, or one for each thread
    uint64_t bytes;    // of a request at most
};

// What a configuration asks for, or suits most disks. Throws Failure where it asks for io_uring, and that is not to be
// had.
ReadPlan plan_reads(const pyorch_config & config);

// Where the plan's ring cannot be had after all, threads do it.
std::unique_ptr<Reader> make_reader(Loader & loader, const ReadPlan & plan);

} // namespace pyorch
