// What the files of this folder share. Each stands for one section of the headers: it checks arguments, calls the
// core, and lets no exception out. What the numbers mean is decided in the core.

#pragma once

#include "base/status.h"

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
        set_last_error("out of memory");
        return PYORCH_IO;
    } catch (const std::exception & e) {
        set_last_error(e.what());
        return PYORCH_IO;
    }
}

} // namespace pyorch
