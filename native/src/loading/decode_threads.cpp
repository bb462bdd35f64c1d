#include "loading/decode_threads.h"

namespace pyorch {

static void decode_until_stopped(Loader & loader) {
    while (loader.decode_next()) {
    }
}

DecodeThreads::DecodeThreads(Loader & loader, int n_threads) : loader(loader) {
    try {
        for (int i = 0; i < n_threads; ++i) {
            threads.emplace_back([&loader] { decode_until_stopped(loader); });
        }
    } catch (...) { // the system has no more threads: those that run must not outlive this
        stop();
        throw;
    }
}

DecodeThreads::~DecodeThreads() { stop(); }

void DecodeThreads::stop() {
    loader.stop_decoding();
    for (auto & t : threads) {
        t.join();
    }
}

} // namespace pyorch
