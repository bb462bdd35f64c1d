// What is read of a load: its requests.
//
// Where small matrices lie together, one request reads several.

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

// One expert on its way into its slot.
struct Load {
    int      layer  = 0; // index into the layers with experts
    int      expert = 0;
    Slot     slot;
    Slot     parts[N_STORED_PARTS]      = {};      // of a compressed expert, from stage() on
    uint32_t there                      = 0;       // bits: those of them that are whole in memory
    bool     staged                     = false;   // who orders has given it memory for all of them
    bool     damaged                    = false;   // what was read of them is not what was packed
    bool     urgent                     = false;   // a layer waits for it
    uint32_t roles                      = ~0u;     // bits: the matrices that are read
    int      n_rows                     = 1;       // of the ubatch that the expert computes
    int      place[PYORCH_MAX_ROLES]    = {};      // of each matrix, in the order of what a layer waits for
    int      sm_place[PYORCH_MAX_ROLES] = {};      // of the read of its signs and mantissas, in the same order
    bool     scheduled                  = false;   // the places are those of schedule()
    Stream * stream                     = nullptr; // of who orders: what the slot is a part of, if not an expert's own
    bool     failed                     = false;
    int      queued                     = 0;  // requests that no reader works on yet
    int      in_flight                  = 0;  // that one does
    uint64_t read                       = 0;  // bytes that are there
    int      unread[PYORCH_MAX_ROLES]   = {}; // requests of each matrix that have not been read yet
    bool     missed[PYORCH_MAX_ROLES]   = {}; // the pack could not be read there

    bool ended() const { return queued == 0 && in_flight == 0; }

    void in_order_of_kernels() {
        std::iota(std::begin(place), std::end(place), 0);
        std::iota(std::begin(sm_place), std::end(sm_place), 0);
        scheduled = false;
    }
};

struct ReadRequest {
    Load *   load;
    int      role;      // the first matrix of which it reads something
    int      last_role; // and the last
    int      file;
    uint64_t offset;
    uint64_t size;   // to read
    uint64_t needed; // of them, the rest is alignment
    char *   buf;
    bool     direct;    // around the page cache
    bool     from_pack; // what it reads has a checksum
    uint32_t complete;  // bits: the matrices of which it was the last request, when it was read
    uint32_t touches;   // bits: the matrices that it reads something of, or is to decode
    Part     part;      // whose slot it reads into
    bool     waits;     // for memory: its load has not been cut into requests yet. No reader sees it

    // What it reads into, where its slot has room for the matrix only as the pack has it.
    std::shared_ptr<char[]> plain = {};

    // Of a compressed expert whose stored parts are there: nothing is to be read, only to be decoded.
    bool reads() const { return size > 0; }

    bool waited_for = false; // by a layer, when a reader took it
};

// Cuts loads into requests, which it appends to a queue.
class Requests {
public:
    Requests(const ModelMap & map, const Source & source) : map(map), source(source) {}

    // All of a load, at most request_bytes each. REQUIRES: the load has its memory
    void cut(Load & load, std::deque<ReadRequest> & queue, uint64_t request_bytes);

    // Of a load that has no memory yet: one that waits for it, and is cut then.
    static void wait(Load & load, std::deque<ReadRequest> & queue);

    // A matrix of an expert of a pack, from the model's own file.
    ReadRequest from_model(Load & load, int role) const;

    // The next load of an expert takes its matrices from here and reads nothing, unless it is in a pack. bytes: of all
    // its matrices, as the model's file has them, in the order of the kernels.
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
