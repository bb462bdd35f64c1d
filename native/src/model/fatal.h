// What becomes of llama.cpp's fatal errors (GGML_ABORT and GGML_ASSERT, in a damaged model too), which end the process.
//
// Their sentence reaches the stderr that the process had when show_fatal_errors() was called: llama-cpp-python points
// stderr elsewhere while it loads a model, and the process would die in silence.
//
// A FatalGuard turns them into exceptions on its thread. llama.cpp catches exceptions where it loads or quantizes a
// model and where it makes a context, and reports a failure; it does so nowhere else, so a guard belongs around these
// alone.

#pragma once

namespace pyorch {

void show_fatal_errors();

// Guards nest.
void guard_fatal_errors(bool on);

struct FatalGuard {
    FatalGuard() { guard_fatal_errors(true); }
    ~FatalGuard() { guard_fatal_errors(false); }
    FatalGuard(const FatalGuard &)             = delete;
    FatalGuard & operator=(const FatalGuard &) = delete;
};

} // namespace pyorch
