// Threads that read, one request at a time each.

#pragma once

#include "loading/reader.h"

#include <thread>
#include <vector>

namespace pyorch {

class ReaderThreads : public Reader {
public:
    ReaderThreads(Loader & loader, int n_threads);
    ~ReaderThreads() override; // ends the requests under way, leaves the rest

    void wait(std::unique_lock<std::mutex> & lock, std::condition_variable & changed) override;

private:
    std::vector<std::thread> threads;

    void stop();
};

} // namespace pyorch
