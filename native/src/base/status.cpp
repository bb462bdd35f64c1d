#include "base/status.h"

#include <cstdarg>
#include <cstdio>

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

} // namespace pyorch
