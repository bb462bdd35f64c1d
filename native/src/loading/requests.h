// Requests: the reads of a load.
//
// One request may read several small matrices that lie together.

#pragma once

#include "banks/bank.h"
#include "loading/source.h"

#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <vector>

namespace pyorch {

struct Stream;

// One expert that is read into its slot.
struct Load {
    int      layer  = 0; // index into the layers with experts
    int      expert = 0;
    Slot     slot;
    Slot     parts[N_STORED_PARTS]      = {};      // of a compressed expert, from stage() on
    uint32_t in_memory                  = 0;       // bits: stored parts that are whole in memory
    bool     staged                     = false;   // it has memory for all stored parts
    bool     damaged                    = false;   // the bytes differ from the packed ones
    bool     urgent                     = false;   // a layer waits for it
    uint32_t roles                      = ~0u;     // bits: the matrices that are read
    int      n_rows                     = 1;       // of the ubatch that the expert computes
    int      place[PYORCH_MAX_ROLES]    = {};      // of each matrix, in the order in which a layer waits for them
    int      sm_place[PYORCH_MAX_ROLES] = {};      // of the read of its signs and mantissas, in the same order
    bool     scheduled                  = false;   // the places are those of schedule()
    Stream * stream                     = nullptr; // the owner's stream whose frame the slot is, if any
    bool     failed                     = false;
    int      queued                     = 0;  // requests that no reader works on yet
    int      in_flight                  = 0;  // requests that a reader works on
    uint64_t read                       = 0;  // bytes in memory
    int      unread[PYORCH_MAX_ROLES]   = {}; // requests of each matrix that have not been read
    bool     missed[PYORCH_MAX_ROLES]   = {}; // the matrices that could not be read from the pack

    bool ended() const { return queued == 0 && in_flight == 0; }

    void in_order_of_kernels() {
        std::iota(std::begin(place), std::end(place), 0);
        std::iota(std::begin(sm_place), std::end(sm_place), 0);
        scheduled = false;
    }
};

struct ReadRequest {
    Load *   load;
    int      role;      // the first matrix that it reads from
    int      last_role; // and the last
    int      file;
    uint64_t offset;
    uint64_t size;   // to read
    uint64_t needed; // without alignment
    char *   buf;
    bool     direct;    // around the page cache
    bool     from_pack; // its bytes have a checksum
    uint32_t complete;  // bits: the matrices of which it was the last request, once it is read
    uint32_t touches;   // bits: the matrices that it reads from, or that are to be decoded
    Part     part;      // the slot's part
    bool     waits;     // for memory: its load has not been cut into requests yet. No reader sees it

    // A buffer for the read, if its slot has room for the matrix only in the pack's form.
    std::shared_ptr<char[]> plain = {};

    // False for a compressed expert whose stored parts are in memory: it is only decoded.
    bool reads() const { return size > 0; }

    bool waited_for = false; // by a layer, when a reader took it
};

// Cuts loads into requests.
class Requests {
public:
    Requests(const ModelMap & map, const Source & source) : map(map), source(source) {}

    // Appends the requests of a load to a queue, at most request_bytes each. REQUIRES: the load has its memory.
    void cut(Load & load, std::deque<ReadRequest> & queue, uint64_t request_bytes);

    // The same for a load without memory: one request that waits for it.
    static void wait(Load & load, std::deque<ReadRequest> & queue);

    // Reads a matrix of an expert of a pack from the model's own file.
    ReadRequest from_model(Load & load, int role) const;

    // The next load of the expert takes its matrices from here and reads nothing, unless the expert is in a pack.
    // bytes: all its matrices, as the model's file has them, in the order of the kernels.
    void offer(int layer, int expert, std::vector<char> bytes) { offered[{ layer, expert }] = std::move(bytes); }

private:
    const ModelMap &                                 map;
    const Source &                                   source;
    std::map<std::pair<int, int>, std::vector<char>> offered; // by layer and expert

    void cut(Load & load, const Extent & extent, std::deque<ReadRequest> & queue, uint64_t request_bytes);
    void ask_nothing(Load & load, std::deque<ReadRequest> & queue, int role, uint64_t needed = 0);
    bool take_offered(Load & load, std::deque<ReadRequest> & queue);
};

} // namespace pyorch
