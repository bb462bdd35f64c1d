// Handles llama.cpp's fatal errors (GGML_ABORT and GGML_ASSERT, also for a damaged model), which end the process.
//
// The message goes to the stderr that the process had at show_fatal_errors(). llama-cpp-python redirects stderr while
// it loads a model, so the process would otherwise end without a message.
//
// A FatalGuard turns fatal errors of its thread into exceptions. llama.cpp catches exceptions only where it loads or
// quantizes a model and where it makes a context, and reports a failure. So use a guard only around these.

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
