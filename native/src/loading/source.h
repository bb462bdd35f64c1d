// Source: reads the bytes of experts from files.

#pragma once

#include "model/model_map.h"

#include <cstdint>
#include <memory>

namespace pyorch {

class Source {
public:
    virtual ~Source() = default;

    // The number of disks with copies of files of the map. Requests to different disks do not delay each other.
    virtual int n_disks() const { return 1; }

    // Reads up to size bytes of a file of the map, from offset, from the copy that is expected to end first. Returns
    // the bytes read, fewer only at the end of the file, or a negative errno. Several threads call at once.
    virtual int64_t read(int file, uint64_t offset, void * buf, uint64_t size) = 0;

    // Direct reads need page-aligned offset, buf and size.
    virtual bool direct(int file) const = 0;

    // For a reader that starts reads itself: the descriptor of a file's copy on a disk; direct: without the page cache,
    // if its file system can. -1: no copy; on disk 0, only read() reads it.
    virtual int descriptor(int /*file*/, bool /*direct*/, int /*disk*/ = 0) const { return -1; }

    // Such a reader asks begin() for the disk, calls check() before the read, and end() after it, even if check()
    // refused. needed: the bytes without which the read has failed. True: the copy failed and is not used again, but
    // another copy has the bytes; begin the request again.
    virtual int  begin(int /*file*/, uint64_t /*size*/) { return 0; }
    virtual bool end(int /*file*/, int /*disk*/, uint64_t /*size*/, uint64_t /*needed*/, int64_t /*result*/) {
        return false;
    }

    // Whether a copy may still be read: 0, or the negative errno of read().
    virtual int check(int /*file*/, int /*disk*/ = 0) { return 0; }

    // Whether a file has changed since it was opened.
    virtual bool changed(int) const { return false; }
};

// Opens the files of the map again: with O_DIRECT if asked and possible, otherwise buffered. A model file that was
// changed in place is refused with ESTALE until its bytes are the old ones; a replaced file is read as it was. If the
// file system says that a file was touched, its begin and a sample of its bytes decide. So a change of single weights
// in place, while a model runs, is not found. A pack has checksums, and is read on.
std::unique_ptr<Source> open_files(const ModelMap & map, bool direct_io);

std::unique_ptr<Source> call_source(pyorch_read_fn read, void * user);

// As configured.
std::unique_ptr<Source> open_source(const ModelMap & map, const pyorch_config & config);

} // namespace pyorch
