// How a failure travels inside the library: as an exception that knows its status and its sentence.
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

// Why an engine failed a decode of this thread, until somebody asks; "": it did not.
inline thread_local std::string decode_error;

// What the library tells people by itself, lines on stderr, reaches the stderr of this moment from now on, whatever the
// process makes of its stderr: llama-cpp-python points it elsewhere while it loads a model.
void keep_stderr();

// "pyorch: LINE"
void notice(const std::string & line);

} // namespace pyorch
