#include "loading/reader_threads.h"

#include "base/cpu_time.h"

#include <chrono>

namespace pyorch {

static void read_until_stopped(Loader & loader) {
    using clock = std::chrono::steady_clock;
    ReadRequest request;
    while (loader.next(request)) {
        const uint64_t cpu  = thread_cpu_ns();
        const auto    begin = clock::now();
        const int64_t n     = !request.reads() ? 0 :
            loader.bytes().read(request.file, request.offset, request.buf, request.size);
        const auto    end   = clock::now();
        loader.finish(request, n, (uint64_t) std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count(),
            thread_cpu_ns() - cpu);
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

ReaderThreads::~ReaderThreads() {
    stop();
}

void ReaderThreads::stop() {
    loader.stop();
    for (auto & t : threads) {
        t.join();
    }
}

void ReaderThreads::wait(std::unique_lock<std::mutex> & lock, std::condition_variable & changed) {
    changed.wait(lock);
}

} // namespace pyorch
