// Where the bytes of experts come from.

#pragma once

#include "model/model_map.h"

#include <cstdint>
#include <memory>

namespace pyorch {

class Source {
public:
    virtual ~Source() = default;

    // Disks with copies of files of the map that can be read: a request of each can be under way without delaying the
    // others.
    virtual int n_disks() const { return 1; }

    // Up to size bytes of a file of the map, from offset, from the copy that is expected to end first. Returns how many
    // were read, fewer only at the end of the file, or a negative errno. Called by several threads at once.
    virtual int64_t read(int file, uint64_t offset, void * buf, uint64_t size) = 0;

    // Direct reads want page-aligned offset, buf and size.
    virtual bool direct(int file) const = 0;

    // For a reader that starts reads itself: the open copy of a file on a disk, around the page cache if direct and its
    // file system can. -1: there is none; on disk 0, only read() brings the bytes.
    virtual int descriptor(int /*file*/, bool /*direct*/, int /*disk*/ = 0) const { return -1; }

    // Such a reader asks with begin() which disk is to read, calls check() before it starts, and end() after it, also
    // where check() refused. needed: of the bytes, without which the read has failed. True: that copy failed, and is
    // left out from now on; another has the bytes, so the request begins again.
    virtual int  begin(int /*file*/, uint64_t /*size*/) { return 0; }
    virtual bool end(int /*file*/, int /*disk*/, uint64_t /*size*/, uint64_t /*needed*/, int64_t /*result*/) {
        return false;
    }

    // Whether a copy may still be read: 0, or the negative errno with which read() would fail.
    virtual int check(int /*file*/, int /*disk*/ = 0) { return 0; }

    // Whether a file is no longer what it was when it was opened.
    virtual bool changed(int) const { return false; }
};

// The files of the map, opened again: O_DIRECT where asked and possible, buffered otherwise. A file of the model that
// was changed in place since is refused with ESTALE, until it is what it was; one that was replaced is read as it was.
// Where the file system says that something was done to a file, its beginning and a sample of its bytes decide: who
// changes single weights in place, while a model runs, is not found. A pack has checksums, and is read on.
std::unique_ptr<Source> open_files(const ModelMap & map, bool direct_io);

std::unique_ptr<Source> call_source(pyorch_read_fn read, void * user);

// What a configuration asks for.
std::unique_ptr<Source> open_source(const ModelMap & map, const pyorch_config & config);

} // namespace pyorch
