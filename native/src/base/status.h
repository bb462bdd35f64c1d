// Failures inside the library: an exception with a status and a sentence.
// The C API turns it into a pyorch_status and pyorch_last_error().

#pragma once

#include "pyorch.h"

#include <stdexcept>
#include <string>

namespace pyorch {

struct Failure : std::runtime_error {
    pyorch_status status;

    Failure(pyorch_status status, const std::string & sentence) : std::runtime_error(sentence), status(status) {}
};

// printf into a string
std::string format(const char * fmt, ...) __attribute__((format(printf, 1, 2)));

// "214 MiB": rounded up, so that the number works when typed in again
std::string mebibytes(uint64_t bytes);

// Why an engine failed a decode of this thread, until it is asked; "": none failed.
inline thread_local std::string decode_error;

// From now on, the library's own messages go to the present stderr of the process, even if the process redirects it:
// llama-cpp-python does so while it loads a model.
void keep_stderr();

// "pyorch: LINE"
void notice(const std::string & line);

} // namespace pyorch
