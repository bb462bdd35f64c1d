#include "loading/readers.h"

#include "base/cpu_time.h"
#include "base/placement.h"
#include "loading/uring_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pyorch {

static void join(std::vector<std::thread> & threads) {
    for (auto & thread : threads) {
        thread.join();
    }
}

// Threads that do work(). If the operating system has no more threads, stop() ends the running ones.
template <typename Work, typename Stop>
static void start(std::vector<std::thread> & threads, int n, Work work, Stop stop) {
    try {
        for (int i = 0; i < n; ++i) {
            threads.emplace_back(work);
        }
    } catch (...) {
        stop();
        join(threads);
        throw;
    }
}

DecodeThreads::DecodeThreads(Loader & loader, int n_threads) : loader(loader) {
    const auto decode = [&loader] {
        do {
            place_thread(false);
        } while (loader.decode_next());
    };
    start(threads, n_threads, decode, [&loader] { loader.stop_decoding(); });
}

DecodeThreads::~DecodeThreads() {
    loader.stop_decoding();
    join(threads);
}

static void read_until_stopped(Loader & loader) {
    ReadRequest request;
    while (loader.next(request)) {
        place_thread(false);
        const uint64_t cpu   = thread_cpu_ns();
        const uint64_t begin = clock_ns();
        const int64_t  n =
            !request.reads() ? 0 : loader.bytes().read(request.file, request.offset, request.buf, request.size);
        const bool decode = loader.read(request, n, clock_ns() - begin, thread_cpu_ns() - cpu);
        if (decode && loader.bytes_to_decode(request) > 0) {
            loader.decode_later(request); // for waiting threads, or for this one when the queue is empty
        } else if (decode) {
            loader.decode(request);
        }
    }
}

ReaderThreads::ReaderThreads(Loader & loader, int n_threads) : Reader(loader) {
    start(threads, n_threads, [&loader] { read_until_stopped(loader); }, [&loader] { loader.stop(); });
}

ReaderThreads::~ReaderThreads() {
    loader.stop();
    join(threads);
}

// Deep enough for most disks; a measurement of the disk gives a better value. Requests are small, so that a read ahead
// delays demand little.
static constexpr int      RING_DEPTH = 4;
static constexpr uint64_t RING_BYTES = 1u << 20;

// A thread that waits for the disk submits nothing meanwhile, so its requests are larger. Threads compete with compute
// threads for cores, and each further one delays the matrix that is needed first.
static constexpr uint64_t THREAD_BYTES = 4u << 20;

static constexpr int MAX_DEPTH = 512;

int default_threads() { return std::clamp((int) std::thread::hardware_concurrency() / 2, 1, 4); }

ReadPlan plan_reads(const pyorch_config & config) {
    if (config.reader < PYORCH_READER_AUTO || config.reader > PYORCH_READER_THREADS) {
        throw Failure(PYORCH_INVALID, format("there is no reader %d", config.reader));
    }
    if (config.read_depth < 0 || config.read_depth > MAX_DEPTH) {
        throw Failure(PYORCH_INVALID,
            format("%d requests cannot be under way at once: 1 to %d can", config.read_depth, MAX_DEPTH));
    }
    // Bytes from the page cache are copied; threads share that work.
    const bool suits    = config.direct_io || config.reader == PYORCH_READER_IO_URING;
    bool       io_uring = config.reader != PYORCH_READER_THREADS && suits && !config.read;
    if (io_uring && !Ring::open(1)) {
        if (config.reader == PYORCH_READER_IO_URING) {
            throw Failure(
                PYORCH_INVALID, format("io_uring cannot be used here (%s): let threads read", strerror(errno)));
        }
        return { false, default_threads(), THREAD_BYTES }; // a ring's depth would be too many threads
    }
    return {
        io_uring,
        config.read_depth > 0 ? config.read_depth :
            io_uring          ? RING_DEPTH :
                                default_threads(),
        config.read_bytes > 0 ? config.read_bytes :
            io_uring          ? RING_BYTES :
                                THREAD_BYTES,
    };
}

std::unique_ptr<Reader> make_reader(Loader & loader, const ReadPlan & plan) {
    const int n_disks = loader.bytes().n_disks(); // each has as many requests as one alone
    if (plan.io_uring) {
        if (auto reader = UringReader::create(loader, plan.depth * n_disks)) {
            return reader;
        }
    }
    return std::make_unique<ReaderThreads>(loader, (plan.io_uring ? default_threads() : plan.depth) * n_disks);
}

} // namespace pyorch
