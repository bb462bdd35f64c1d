// Threads for decode stages that compute, beside a reader whose thread must not.

#pragma once

#include "loading/loader.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace pyorch {

class DecodeThreads {
public:
    DecodeThreads(Loader & loader, int n_threads);
    ~DecodeThreads(); // decodes what was handed over first

    // A request for which Loader::read returned true.
    void push(const ReadRequest & request);

private:
    Loader &                 loader;
    std::mutex               mutex;
    std::condition_variable  work;
    std::deque<ReadRequest>  requests;
    bool                     ending = false;
    std::vector<std::thread> threads;

    void run();
    void stop();
};

} // namespace pyorch
