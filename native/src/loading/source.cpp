#include "loading/source.h"

#include "base/callback.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef O_DIRECT
#define O_DIRECT 0 // not on this system: reads are buffered
#endif

namespace pyorch {
namespace {

bool differ(const timespec & a, const timespec & b) { return a.tv_sec != b.tv_sec || a.tv_nsec != b.tv_nsec; }

class FileSource : public Source {
public:
    FileSource(const ModelMap & map, bool direct_io) : n_shards(map.n_shards) {
        for (const auto & f : map.files) {
            files.push_back(std::make_unique<File>());
            File & file = *files.back();
            file.fd     = open(f.path.c_str(), O_RDONLY | O_CLOEXEC);
            if (file.fd < 0 || fstat(file.fd, &file.opened) != 0) {
                throw Failure(PYORCH_IO, format("%s: %s", f.path.c_str(), strerror(errno)));
            }
            if (direct_io && O_DIRECT != 0) {
                // Some file systems accept the flag and refuse the read, so try one.
                file.direct_fd = open(f.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
                alignas(4096) static thread_local char page[4096];
                if (file.direct_fd >= 0 && pread(file.direct_fd, page, sizeof(page), 0) < 0) {
                    close(file.direct_fd);
                    file.direct_fd = -1;
                }
            }
        }
    }

    // Half of an expert from before a change and half from after it would be silent garbage, where nothing has
    // checksums.
    int check(int file) override { return file < n_shards && changed(file) ? -ESTALE : 0; }

    bool changed(int file) const override {
        const File & f = *files[file];
        struct stat  now;
        if (fstat(f.fd, &now) != 0 || differ(now.st_mtim, f.opened.st_mtim) || now.st_size != f.opened.st_size) {
            return true;
        }
        // Who copies over a file may set its time back; the time of the inode cannot be set. But that changes with the
        // number of names too, and a file that was deleted or replaced by another is read as it was.
        return now.st_nlink == f.opened.st_nlink && differ(now.st_ctim, f.opened.st_ctim);
    }

    int descriptor(int file, bool direct) const override { return direct ? files[file]->direct_fd : files[file]->fd; }

    int64_t read(int file, uint64_t offset, void * buf, uint64_t size) override {
        if (const int error = check(file)) {
            return error;
        }
        const File & f       = *files[file];
        const bool   aligned = (offset | size | (uintptr_t) buf) % 4096 == 0;
        const int    fd      = f.direct_fd >= 0 && aligned ? f.direct_fd : f.fd;
        uint64_t     done    = 0;
        while (done < size) {
            const ssize_t n = pread(fd, (char *) buf + done, size - done, (off_t) (offset + done));
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n < 0) {
                return -errno;
            }
            done += (uint64_t) n;
            // A direct read that stops off a page boundary has met the end of the file.
            if (n == 0 || (fd == f.direct_fd && done % 4096 != 0)) {
                break;
            }
        }
        return (int64_t) done;
    }

    bool direct(int file) const override { return files[file]->direct_fd >= 0; }

private:
    struct File {
        int         fd        = -1;
        int         direct_fd = -1;
        struct stat opened    = {};

        ~File() {
            for (int open_fd : { fd, direct_fd }) {
                if (open_fd >= 0) {
                    close(open_fd);
                }
            }
        }
    };

    const int                          n_shards;
    std::vector<std::unique_ptr<File>> files;
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
