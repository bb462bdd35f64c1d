#include "banks/page_locks.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

namespace pyorch {

PageLocks::PageLocks(const std::vector<ggml_backend_dev_t> & devices) {
    const char * const told = getenv("PYORCH_UPLOADS");
    if (told && *told) { // the user wants the lanes of device/link.h
        return;
    }
    for (ggml_backend_dev_t device : devices) {
        const ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
        const auto               found    = [&](const char * name) {
            return registry ? ggml_backend_reg_get_proc_address(registry, name) : nullptr;
        };
        const auto locks   = (bool (*)(void *, size_t)) found("ggml_backend_register_host_buffer");
        const auto unlocks = (void (*)(void *)) found("ggml_backend_unregister_host_buffer");
        if (locks && unlocks) {
            setenv("GGML_CUDA_REGISTER_HOST", "1", 0); // otherwise it refuses
            do_lock   = [locks](char * begin, uint64_t bytes) { return locks(begin, bytes); };
            do_unlock = [unlocks](char * begin) { unlocks(begin); };
            return;
        }
    }
}

void PageLocks::lock(char * begin, uint64_t bytes) {
    WriteLock lock(mutex);
    if (!do_lock) {
        return;
    }
    if (do_lock(begin, bytes)) {
        pieces[begin] = bytes;
    } else {
        do_lock = nullptr;
    }
}

void PageLocks::unlock(const char * begin, uint64_t bytes) {
    WriteLock lock(mutex); // from here on no read begins
    bool      settled = false;
    for (auto piece = pieces.begin(); piece != pieces.end();) {
        const bool meets = piece->first < begin + bytes && begin < piece->first + piece->second;
        for (const auto & [reader, settle] : settles) {
            if (meets && !settled) {
                settle();
            }
        }
        settled |= meets;
        if (meets) {
            do_unlock(piece->first);
        }
        piece = meets ? pieces.erase(piece) : std::next(piece);
    }
}

bool PageLocks::read(
    const char * bytes, uint64_t n, const std::function<void(const char * begin, uint64_t n)> & use) const {
    ReadLock   lock(mutex);
    const auto first = pieces.upper_bound((char *) bytes);
    if (first == pieces.begin()) {
        return false;
    }
    const char * const end     = bytes + n;
    const auto         end_of  = [](const auto & piece) { return piece.first + piece.second; };
    auto               piece   = std::prev(first);
    const char *       reaches = end_of(*piece);
    for (auto next = first; reaches < end && next != pieces.end() && next->first == reaches; ++next) {
        reaches = end_of(*next);
    }
    if (bytes >= end_of(*piece) || reaches < end) {
        return false;
    }
    for (const char * begin = bytes; begin < end; ++piece) {
        const char * const to = std::min<const char *>(end_of(*piece), end);
        use(begin, to - begin);
        begin = to;
    }
    return true;
}

void PageLocks::on_unlock(const void * reader, std::function<void()> f) {
    WriteLock lock(mutex);
    settles.erase(reader);
    if (f) {
        settles[reader] = std::move(f);
    }
}

} // namespace pyorch
