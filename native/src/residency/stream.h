// A layer whose experts do not fit into memory together: its matrices pass through a window, one after another.
//
// mul_mat_id goes through all experts with one of their matrices, then with the next (a pass each). Within a pass the
// compute threads go through the experts in ascending order; a thread that asks for one is done with those before it,
// and one that asks for a matrix of the next pass is done, as all threads are, with the pass before. So the order in
// which matrices are needed is known: they are numbered by it. The window is a ring of slots, in which number m lies in
// slot m % size from the time when all threads are past m - size until they are past m. Each matrix is read once.
//
//     passed            all threads are past those before it        frames[m % size], passed <= m < begun
//     begun             read next, at most passed + size
//
// Its owner holds the slots of the window from acquire() to release(); nobody waits for memory in between.

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
        int64_t      number  = -1;      // of the matrix in it; -1: none, or none that is still wanted
        const char * address = nullptr; // once the matrix is there
    };

    int                layer;
    std::vector<int>   experts;     // ascending
    std::vector<int>   place_of;    // by expert: in that list, -1 for one that is held whole
    std::vector<int>   roles;       // of the passes
    std::vector<Frame> frames = {}; // never moved
    int                pass   = -1; // that the threads are in
    std::vector<std::pair<const void *, int>>
                reached = {}; // in this pass: threads, and the place that each asked for last
    int64_t     passed  = 0;
    int64_t     begun   = 0;
    bool        closed  = false; // the owner is gone, a reader is still at work
    std::string error   = {};    // why a matrix could not be read: the rest is not

    int64_t n_matrices() const { return (int64_t) (roles.size() * experts.size()); }
    int64_t number(int place) const { return (int64_t) pass * (int64_t) experts.size() + place; }
    Frame & frame(int64_t number) { return frames[number % (int64_t) frames.size()]; }

    Frame & frame_of(const Load & load);

    // A thread asks for a matrix: `passed` follows. False if the graph takes another order than was thought: then
    // nothing that was begun for later passes is what comes next.
    bool ask(int role, int place, const void * thread, int n_threads);
};

// All of them: their windows, and what is read into them.
class Streams {
public:
    Streams(Residents & residents, Loader & loads);

    // A layer of owner begins to pass these experts through a window of so many slots. Where the system has no memory
    // for one, stream->error says so.
    // REQUIRES: room for the window
    void open(const Locked & locked, Owner & owner, int layer, const std::vector<int> & experts, int window);

    // A thread asks for a matrix, and is done with those before it: more is read. The number of the matrix.
    int64_t ask(const Locked & locked, Stream & s, int expert, int role, const void * thread, int n_threads);

    // Null until the matrix with that number is there. It stays until all threads have asked for a later one.
    static const char * address(Stream & s, int64_t number) {
        const Stream::Frame & frame = s.frame(number);
        return frame.number == number ? frame.address : nullptr;
    }

    // A read of a window came to its end.
    void finished(const Locked & locked, Load & load);

    // The layer is over. What a reader still works on goes when that ends.
    void close(const Locked & locked, Owner & owner);

private:
    Residents &                          residents;
    const ModelMap &                     map  = residents.map;
    Bank &                               bank = residents.bank;
    Loader &                             loads;
    std::vector<std::vector<int>>        passes;  // by layer: roles, in the order in which the kernels go through them
    std::vector<std::unique_ptr<Stream>> streams; // closed ones too, while a reader is at work for them

    void fill(const Locked & locked, Stream & s);
    void give_frames(Stream & s);
};

} // namespace pyorch
