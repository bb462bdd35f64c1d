// The streams of layers that do not fit into memory whole (stream.h): their windows, and what is read into them.

#pragma once

#include "loading/loader.h"
#include "residency/residents.h"
#include "residency/stream.h"

#include <memory>
#include <string>
#include <vector>

namespace pyorch {

class Streams {
public:
    Streams(const ModelMap & map, Bank & bank, Residents & residents, Loader & loads);

    // A layer of owner begins to pass these experts through a window of so many slots. Where the system has no memory
    // for one, stream->error says so.
    // REQUIRES: room for the window
    void open(Owner & owner, int layer, const std::vector<int> & experts, int window);

    // A thread asks for a matrix, and is done with those before it: more is read. The number of the matrix.
    int64_t ask(Stream & s, int expert, int role, const void * thread, int n_threads);

    // Null until the matrix with that number is there. It stays until all threads have asked for a later one.
    static const char * address(Stream & s, int64_t number) {
        const Stream::Frame & frame = s.frame(number);
        return frame.number == number ? frame.address : nullptr;
    }

    // A read of a window came to its end.
    void finished(Load & load);

    // The layer is over. What a reader still works on goes when that ends.
    void close(Owner & owner);

private:
    const ModelMap &                     map;
    Bank &                               bank;
    Residents &                          residents;
    Loader &                             loads;
    std::vector<std::vector<int>>        passes;  // by layer: roles, in the order in which the kernels go through them
    std::vector<std::unique_ptr<Stream>> streams; // closed ones too, while a reader is at work for them

    void fill(Stream & s);
    void give_frames(Stream & s);
};

} // namespace pyorch
