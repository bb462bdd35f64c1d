// A layer whose experts do not fit into memory together: its matrices pass through a window, one after another.
//
// mul_mat_id computes one matrix of all experts, then the next matrix of all experts (one pass each). Within a pass the
// compute threads take the experts in ascending order. A thread that asks for an expert has finished the experts before
// it. A thread that asks for a matrix of the next pass has finished this pass, and so have all threads. So the order of
// the matrices is known, and they are numbered by it. The window is a ring of slots: matrix m lies in slot m % size,
// from the time when all threads have finished m - size until they have finished m. Each matrix is read once.
//
//     passed            all threads have finished the matrices before it     frames[m % size], passed <= m < begun
//     begun             the next matrix to read, at most passed + size
//
// The owner of the stream holds the slots of the window from acquire() to release(); no thread waits for memory
// between.

#pragma once

#include "loading/loader.h"
#include "residency/residents.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pyorch {

struct Stream {
    struct Frame {
        Load         load;              // load.stream names this stream
        int64_t      number  = -1;      // of its matrix; -1: none, or an unwanted one
        const char * address = nullptr; // once the matrix was read
    };

    int                layer;
    std::vector<int>   experts;     // ascending
    std::vector<int>   place_of;    // by expert: its index in `experts`, -1 if it is held whole
    std::vector<int>   roles;       // of the passes
    std::vector<Frame> frames = {}; // never moved
    int                pass   = -1; // the present pass of the threads
    std::vector<std::pair<const void *, int>>
                reached = {}; // in this pass: threads, and the place of the last expert that each asked for
    int64_t     passed  = 0;
    int64_t     begun   = 0;
    bool        closed  = false; // the owner is gone, but a reader still works
    std::string error   = {};    // why a matrix could not be read; no further matrix is read

    int64_t n_matrices() const { return (int64_t) (roles.size() * experts.size()); }
    int64_t number(int place) const { return (int64_t) pass * (int64_t) experts.size() + place; }
    Frame & frame(int64_t number) { return frames[number % (int64_t) frames.size()]; }

    Frame & frame_of(const Load & load);

    // A thread asks for a matrix; moves `passed`. False if the graph takes another order than expected: then no begun
    // matrix of a later pass comes next.
    bool ask(int role, int place, const void * thread, int n_threads);
};

// All streams: their windows, and the loads into them.
class Streams {
public:
    Streams(Residents & residents, Loader & loads);

    // A layer of owner begins to pass these experts through a window of `window` slots. If the operating system has no
    // memory for a slot, stream->error says so.
    // REQUIRES: the budget has room for the window
    void open(const Locked & locked, Owner & owner, int layer, const std::vector<int> & experts, int window);

    // A thread asks for a matrix, and has finished the matrices before it; more are read. Returns the matrix's number.
    int64_t ask(const Locked & locked, Stream & s, int expert, int role, const void * thread, int n_threads);

    // Null until the matrix with that number was read. It stays until all threads have asked for a later one.
    static const char * address(Stream & s, int64_t number) {
        const Stream::Frame & frame = s.frame(number);
        return frame.number == number ? frame.address : nullptr;
    }

    // A read for a window has ended.
    void finished(const Locked & locked, Load & load);

    // The layer is over. A frame that a reader works on is freed when its read ends.
    void close(const Locked & locked, Owner & owner);

private:
    Residents &                          residents;
    const ModelMap &                     map  = residents.map;
    Bank &                               bank = residents.bank;
    Loader &                             loads;
    std::vector<std::vector<int>>        passes;  // by layer: roles in the order of the kernels
    std::vector<std::unique_ptr<Stream>> streams; // with closed ones, while a reader works for them

    void fill(const Locked & locked, Stream & s);
    void give_frames(Stream & s);
};

} // namespace pyorch
