#include "loading/decode_threads.h"

namespace pyorch {

DecodeThreads::DecodeThreads(Loader & loader, int n_threads) : loader(loader) {
    try {
        for (int i = 0; i < n_threads; ++i) {
            threads.emplace_back([this] { run(); });
        }
    } catch (...) { // the system has no more threads: those that run must not outlive this
        stop();
        throw;
    }
}

DecodeThreads::~DecodeThreads() {
    stop();
}

void DecodeThreads::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        ending = true;
    }
    work.notify_all();
    for (auto & t : threads) {
        t.join();
    }
}

void DecodeThreads::push(const ReadRequest & request) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        requests.push_back(request);
    }
    work.notify_one();
}

void DecodeThreads::run() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        work.wait(lock, [this] { return ending || !requests.empty(); });
        if (requests.empty()) {
            return;
        }
        const ReadRequest request = requests.front();
        requests.pop_front();
        lock.unlock();
        loader.decode(request);
        lock.lock();
    }
}

} // namespace pyorch
