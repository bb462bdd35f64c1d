#include "base/notice.h"

#include <cstdio>
#include <fcntl.h>
#include <unistd.h>

namespace pyorch {

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
