// Where the bytes of experts come from.

#pragma once

#include "model/model_map.h"

#include <cstdint>
#include <memory>

namespace pyorch {

class Source {
public:
    virtual ~Source() = default;

    // Up to size bytes of a file of the map, from offset. Returns how many were read, fewer only at
    // the end of the file, or a negative errno. Called by several threads at once.
    virtual int64_t read(int file, uint64_t offset, void * buf, uint64_t size) = 0;

    // Direct reads want page-aligned offset, buf and size.
    virtual bool direct(int file) const = 0;

    // The open file, for a reader that starts reads itself: around the page cache if direct. It calls check() before
    // each. -1: only read() brings the bytes.
    virtual int descriptor(int, bool) const { return -1; }

    // Whether a file may still be read: 0, or the negative errno with which read() would fail.
    virtual int check(int) { return 0; }

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
