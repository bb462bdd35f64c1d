// Threads for decode stages that compute, beside a reader whose thread must not, and beside those who wait for what is
// decoded.

#pragma once

#include "loading/loader.h"

#include <thread>
#include <vector>

namespace pyorch {

class DecodeThreads {
public:
    DecodeThreads(Loader & loader, int n_threads);
    ~DecodeThreads(); // decodes what was left to them first

private:
    Loader &                 loader;
    std::vector<std::thread> threads;

    void stop();
};

} // namespace pyorch
