// What the files of this folder share. Each stands for one section of the headers: it checks arguments, calls the
// core, and lets no exception out. What the numbers mean is decided in the core.

#pragma once

#include "base/callback.h"
#include "base/status.h"

#include <new>

namespace pyorch {

// The sentence of a failure, for pyorch_last_error() of the calling thread.
void set_last_error(const char * sentence);

// Runs what a function of the API does; what it throws becomes the status and the sentence of the call.
template <typename Body>
pyorch_status guarded(Body body) {
    try {
        body();
        return PYORCH_OK;
    } catch (const Failure & e) {
        set_last_error(e.what());
        return e.status;
    } catch (const std::bad_alloc &) {
        set_last_error("the system has no memory left for this");
        return PYORCH_MEMORY;
    } catch (const std::length_error &) { // a container that no memory would hold
        set_last_error("the system has no memory left for this");
        return PYORCH_MEMORY;
    } catch (const std::exception & e) {
        set_last_error(e.what());
        return PYORCH_IO;
    }
}

// The same for what is not allowed inside a callback. function: its name.
template <typename Body>
pyorch_status guarded_outside_callbacks(const char * function, Body body) {
    return guarded([&] {
        if (in_callback()) {
            throw Failure(PYORCH_CALLBACK,
                format("%s cannot be called inside a callback, for which it might wait: "
                       "call it from another thread, or afterwards",
                    function));
        }
        body();
    });
}

} // namespace pyorch
