// Who ends the requests of a loader: threads beside the compute threads, or a replay in its simulated time.
//
// A reader takes requests with Loader::next or try_next, as many at once as it likes, and ends each with read and
// decode, or with finish, which is both.

#pragma once

#include "loading/loader.h"

namespace pyorch {

class Reader {
public:
    // A loader has one reader at a time.
    explicit Reader(Loader & loader) : loader(loader) { attach(this); }

    virtual ~Reader() { attach(nullptr); }

    Reader(const Reader &)             = delete;
    Reader & operator=(const Reader &) = delete;

    // Called by who needs memory that reads under way hold, with the loader's mutex locked: lets go of it, and
    // returns with it when something may have changed.
    virtual void wait(std::unique_lock<std::mutex> & lock, std::condition_variable & changed) = 0;

    // Called when new requests may be there, with the loader's mutex locked or not; who sleeps in Loader::next is woken
    // anyway. No longer called once attach(nullptr) has returned.
    virtual void wake() {}

protected:
    Loader & loader;

    void attach(Reader * reader) {
        std::lock_guard<std::mutex> lock(loader.mutex);
        std::lock_guard<std::mutex> telling(loader.waking);
        loader.reader = reader;
    }
};

} // namespace pyorch
