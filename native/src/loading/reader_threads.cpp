#include "loading/reader_threads.h"

#include "base/cpu_time.h"

#include <chrono>

namespace pyorch {

static void read_until_stopped(Loader & loader) {
    using clock = std::chrono::steady_clock;
    ReadRequest request;
    while (loader.next(request)) {
        const uint64_t cpu   = thread_cpu_ns();
        const auto     begin = clock::now();
        const int64_t  n =
            !request.reads() ? 0 : loader.bytes().read(request.file, request.offset, request.buf, request.size);
        const auto end    = clock::now();
        const auto ns     = std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
        const bool decode = loader.read(request, n, (uint64_t) ns, thread_cpu_ns() - cpu);
        if (decode && loader.bytes_to_decode(request) > 0) {
            loader.decode_later(request); // by who waits for it, or here, when there is nothing to read
        } else if (decode) {
            loader.decode(request);
        }
    }
}

ReaderThreads::ReaderThreads(Loader & loader, int n_threads) : Reader(loader) {
    try {
        for (int i = 0; i < n_threads; ++i) {
            threads.emplace_back([&loader] { read_until_stopped(loader); });
        }
    } catch (...) { // the system has no more threads: those that run must not outlive this
        stop();
        throw;
    }
}

ReaderThreads::~ReaderThreads() { stop(); }

void ReaderThreads::stop() {
    loader.stop();
    for (auto & t : threads) {
        t.join();
    }
}

void ReaderThreads::wait(std::unique_lock<std::mutex> & lock, std::condition_variable & changed) { changed.wait(lock); }

} // namespace pyorch
