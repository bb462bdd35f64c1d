#include "loading/source.h"

#include "base/callback.h"
#include "base/checksum.h"
#include "base/mutex.h"
#include "base/status.h"
#include "loading/disks.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#ifndef EREMOTEIO
#define EREMOTEIO EIO // this system has none
#endif
#ifndef O_DIRECT
#define O_DIRECT 0 // this system has none: reads are buffered
#endif

namespace pyorch {
namespace {

constexpr uint64_t BLOCK        = 4096;
constexpr uint64_t HEADER_BYTES = 64 * 1024;
constexpr uint64_t N_SAMPLED    = 64; // blocks

bool same(const timespec & a, const timespec & b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

// Whether a file was left alone: whatever is done to it sets the time of its inode, which no call can set back.
bool same(const struct stat & a, const struct stat & b) {
    return a.st_size == b.st_size && same(a.st_mtim, b.st_mtim) && same(a.st_ctim, b.st_ctim);
}

// A hash of the begin of a file and of blocks all over it; 0 if it cannot be read.
uint64_t sample(int fd, uint64_t size) {
    std::vector<char> bytes(HEADER_BYTES + N_SAMPLED * BLOCK);
    const ssize_t     header = pread(fd, bytes.data(), HEADER_BYTES, 0);
    bool              read   = header >= 0;
    for (uint64_t i = 0; i < N_SAMPLED && size > HEADER_BYTES; ++i) {
        const uint64_t offset = HEADER_BYTES + (size - HEADER_BYTES) / N_SAMPLED * i;
        read                  = read && pread(fd, &bytes[HEADER_BYTES + i * BLOCK], BLOCK, (off_t) offset) >= 0;
    }
    return read ? checksum(bytes.data(), bytes.size()) : 0;
}

class FileSource : public Source {
public:
    FileSource(const ModelMap & map, bool direct_io) : n_shards(map.n_shards), disks(n_copies(map)) {
        for (const auto & f : map.files) {
            auto & copies = files.emplace_back();
            copies.push_back(open_copy(f.path, direct_io));
            for (const std::string & path : f.copies) {
                copies.push_back(path.empty() ? nullptr : open_copy(path, direct_io));
                File * copy = copies.back().get();
                if (copy) {
                    copy->is_mirror = true;
                }
                if (copy && (copy->bytes != copies[0]->bytes || copy->sampled != copies[0]->sampled)) {
                    throw Failure(
                        PYORCH_FORMAT, format("%s is no copy of %s: their bytes differ", path.c_str(), f.path.c_str()));
                }
            }
            copies.resize(disks.count());
        }
        n_usable = count_usable();
    }

    int n_disks() const override { return n_usable; }

    // Half of an expert from before a change and half from after it would give silent garbage, without checksums. For a
    // pack it matters only while another copy has the bytes.
    int check(int file, int disk) override {
        return (file < n_shards || has_other(file, disk)) && changed(*files[file][disk]) ? -ESTALE : 0;
    }

    bool changed(int file) const override { return changed(*files[file][0]); }

    int descriptor(int file, bool direct, int disk) const override {
        const File * f = files[file][disk].get();
        return !f ? -1 : direct && f->direct_fd >= 0 ? f->direct_fd : f->fd;
    }

    int begin(int file, uint64_t size) override {
        return disks.begin(size, [&](int disk) { return usable(file, disk); });
    }

    bool end(int file, int disk, uint64_t size, uint64_t needed, int64_t result) override {
        disks.end(disk, size, result);
        File & failed = *files[file][disk];
        if (result >= (int64_t) needed) {
            failed.in_a_row.store(0, std::memory_order_relaxed);
            return false;
        }
        MutexLock lock(leaving);
        if (!has_other(file, disk)) {
            return false;
        }
        // If the disk did not fail (memory was short, perhaps), another copy may serve this one request.
        if (result < 0 && !is_of_disk((int) -result) && ++failed.in_a_row < MAX_IN_A_ROW) {
            return true;
        }
        if (!failed.left_out.exchange(true)) {
            n_usable = count_usable();
            notice(
                format("note: cannot read %s: %s; it is left out, and the other copies are read", failed.path.c_str(),
                    result == -ESTALE ? "the file was changed after it was loaded" :
                        result < 0    ? strerror((int) -result) :
                                        "the file ends before an expert"));
        }
        return true;
    }

    int64_t read(int file, uint64_t offset, void * buf, uint64_t size) override {
        // A direct read is widened to pages; the end of the file may cut it.
        const uint64_t bytes  = files[file][0]->bytes;
        const uint64_t left   = bytes > offset ? bytes - offset : 0;
        const uint64_t needed = std::min(size, left);
        for (;;) {
            const int     disk   = begin(file, size);
            const int     error  = check(file, disk);
            const int64_t result = error ? error : read(*files[file][disk], offset, buf, size);
            if (!end(file, disk, size, needed, result)) {
                return result;
            }
        }
    }

    bool direct(int file) const override {
        return std::any_of(files[file].begin(), files[file].end(),
            [](const std::unique_ptr<File> & copy) { return copy && copy->direct_fd >= 0; });
    }

private:
    static constexpr int MAX_IN_A_ROW = 3;

    struct File {
        std::string path;
        int         fd        = -1;
        int         direct_fd = -1;
        // What fstat() said when the bytes were the sampled ones, and when they were not.
        struct stat       opened GUARDED_BY(mutex) = {}, refused GUARDED_BY(mutex) = {};
        uint64_t          bytes     = 0;
        uint64_t          sampled   = 0;
        bool              is_mirror = false;
        Mutex             mutex;
        std::atomic<bool> left_out{ false };
        std::atomic<int>  in_a_row{ 0 }; // requests that failed

        ~File() {
            for (int open_fd : { fd, direct_fd }) {
                if (open_fd >= 0) {
                    close(open_fd);
                }
            }
        }
    };

    static int n_copies(const ModelMap & map) {
        size_t n = 0;
        for (const MapFile & file : map.files) {
            n = std::max(n, file.copies.size());
        }
        return (int) n + 1;
    }

    static std::unique_ptr<File> open_copy(const std::string & path, bool direct_io) {
        auto   opened = std::make_unique<File>();
        File & file   = *opened;
        file.path     = path;
        file.fd       = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        MutexLock lock(file.mutex); // for the analysis: no other thread has it yet
        if (file.fd < 0 || fstat(file.fd, &file.opened) != 0) {
            throw Failure(PYORCH_IO, format("%s: %s", path.c_str(), strerror(errno)));
        }
        file.bytes   = (uint64_t) file.opened.st_size;
        file.sampled = sample(file.fd, file.bytes);
        if (direct_io && O_DIRECT != 0) {
            // Some file systems accept the flag and refuse the read, so try one.
            file.direct_fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
            alignas(4096) static thread_local char page[4096];
            if (file.direct_fd >= 0 && pread(file.direct_fd, page, sizeof(page), 0) < 0) {
                close(file.direct_fd);
                file.direct_fd = -1;
            }
        }
        return opened;
    }

    static bool is_of_disk(int error) {
        return error == EIO || error == ESTALE || error == ENXIO || error == ENODEV || error == EREMOTEIO ||
            error == EBADMSG || error == ENOTCONN || error == ETIMEDOUT;
    }

    int count_usable() const {
        int n = 0;
        for (int disk = 0; disk < disks.count(); ++disk) {
            bool any = false;
            for (int file = 0; file < (int) files.size(); ++file) {
                any = any || usable(file, disk);
            }
            n += any;
        }
        return n;
    }

    bool usable(int file, int disk) const { return files[file][disk] && !files[file][disk]->left_out; }

    bool has_other(int file, int disk) const {
        for (int other = 0; other < disks.count(); ++other) {
            if (other != disk && usable(file, other)) {
                return true;
            }
        }
        return false;
    }

    static bool changed(File & f) {
        struct stat now;
        MutexLock   lock(f.mutex);
        if (fstat(f.fd, &now) != 0 || now.st_size != f.opened.st_size) {
            return true;
        }
        // A changed copy is not read: the original has the bytes.
        if (f.is_mirror && !same(now.st_mtim, f.opened.st_mtim)) {
            return true;
        }
        // Touching, moving, linking or deleting a file changes none of its bytes, and neither does a new file in its
        // place. A copy over it may set its time back.
        if (!same(now, f.opened) && !same(now, f.refused)) {
            const uint64_t sampled = sample(f.fd, (uint64_t) now.st_size);
            if (sampled != 0) { // otherwise the next request tries again
                (sampled == f.sampled ? f.opened : f.refused) = now;
            }
        }
        return !same(now, f.opened);
    }

    static int64_t read(const File & f, uint64_t offset, void * buf, uint64_t size) {
        const bool aligned = (offset | size | (uintptr_t) buf) % 4096 == 0;
        const int  fd      = f.direct_fd >= 0 && aligned ? f.direct_fd : f.fd;
        uint64_t   done    = 0;
        while (done < size) {
            const ssize_t n = pread(fd, (char *) buf + done, size - done, (off_t) (offset + done));
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n < 0) {
                return -errno;
            }
            done += (uint64_t) n;
            // A direct read that stops inside a page has met the end of the file.
            if (n == 0 || (fd == f.direct_fd && done % 4096 != 0)) {
                break;
            }
        }
        return (int64_t) done;
    }

    const int                                       n_shards;
    std::atomic<int>                                n_usable{ 1 }; // disks
    Disks                                           disks;
    Mutex                                           leaving; // the last copy of a file stays
    std::vector<std::vector<std::unique_ptr<File>>> files;   // [n_files][n_disks], null where a disk lacks one
};

class CallSource : public Source {
public:
    CallSource(pyorch_read_fn fn, void * user) : fn(fn), user(user) {}

    int64_t read(int file, uint64_t offset, void * buf, uint64_t size) override {
        CallbackScope scope;
        return fn(user, file, offset, buf, size);
    }

    bool direct(int) const override { return false; }

private:
    pyorch_read_fn fn;
    void *         user;
};

} // namespace

std::unique_ptr<Source> open_files(const ModelMap & map, bool direct_io) {
    return std::make_unique<FileSource>(map, direct_io);
}

std::unique_ptr<Source> call_source(pyorch_read_fn read, void * user) {
    return std::make_unique<CallSource>(read, user);
}

std::unique_ptr<Source> open_source(const ModelMap & map, const pyorch_config & config) {
    return config.read ? call_source(config.read, config.read_user) : open_files(map, config.direct_io != 0);
}

} // namespace pyorch
