#include "base/status.h"

#include <cstdarg>
#include <cstdio>
#include <fcntl.h>
#include <unistd.h>

namespace pyorch {

std::string format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    va_list again;
    va_copy(again, args);
    const int n = vsnprintf(nullptr, 0, fmt, args);
    va_end(args);

    std::string out(n > 0 ? n : 0, '\0');
    if (n > 0) {
        vsnprintf(&out[0], n + 1, fmt, again);
    }
    va_end(again);
    return out;
}

std::string mebibytes(uint64_t bytes) {
    return format("%llu MiB", (unsigned long long) ((bytes + (1u << 20) - 1) >> 20));
}

static int stderr_fd = -1;

void keep_stderr() {
    if (stderr_fd < 0) {
        stderr_fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
    }
}

void notice(const std::string & line) {
    dprintf(stderr_fd >= 0 ? stderr_fd : STDERR_FILENO, "pyorch: %s\n", line.c_str());
}

} // namespace pyorch
