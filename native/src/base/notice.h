// What the library tells people by itself: lines on stderr.

#pragma once

#include <string>

namespace pyorch {

// Lines reach the stderr of this moment from now on, whatever the process makes of its stderr: llama-cpp-python points
// it elsewhere while it loads a model.
void keep_stderr();

// "pyorch: LINE"
void notice(const std::string & line);

} // namespace pyorch
