// What the table knows of one expert, and of one context.

#pragma once

#include "loading/loader.h"
#include "residency/eviction.h"

#include <atomic>
#include <string>
#include <vector>

namespace pyorch {

struct Expert {
    static constexpr uint32_t FAILED = 1u << 31;

    // Read by the kernels without the mutex: a bit for each matrix that is there, or FAILED. An
    // address is valid once its bit was seen.
    std::atomic<uint32_t> ready{ 0 };
    const char *          addr[PYORCH_MAX_ROLES] = {};

    Load         load;                       // its layer and id; and while it is loading, all of that
    Slot         slot;                       // its memory, from the beginning of its load
    Form         form        = Form::ABSENT; // that it is resident in, for kernels to compute with
    Form         kept        = Form::ABSENT; // the pool that has its stored parts, whole ones, beside that (pools.h)
    bool         pinned      = false;
    bool         scanned     = false;   // only ever used by wide batches
    bool         changed     = false;   // since its keys were last computed, see Table::value_changed
    bool         read_ahead  = false;   // and not used yet
    bool         unasked     = false;   // its load began before a layer needed it, and is not counted yet
    bool         guessed     = false;   // read ahead on a guess, for the next pass of its layer
    const void * guessed_for = nullptr; // by this context
    bool         elsewhere   = false;   // another server computes it now: it is not read ahead here
    bool         above       = false;   // a tier above has it, or is getting it: it goes first here
    bool         displaced   = false;   // had to go since its layer last came
    bool         unwanted    = false;   // that pass went without it: its load ends with the request under way
    int          in_use      = 0;       // by running layers
    uint64_t     uses        = 0;       // that were counted: hits and misses
    Usage        usage;
    std::string  error; // why it is FAILED

    int  layer() const { return load.layer; }
    int  id() const { return load.expert; }
    bool loading() const { return load.form != Form::ABSENT; }
    bool resident() const { return form != Form::ABSENT; }
    bool absent() const { return !loading() && !resident(); }

    // Whether something was read ahead that would be lost now.
    bool read_in_vain() const { return read_ahead && (resident() || load.read > 0 || load.in_flight > 0); }
    bool failed() const { return ready.load(std::memory_order_relaxed) & FAILED; }
};

struct Stream;

// What one context holds. A context computes one layer at a time.
struct Owner {
    const void *          context   = nullptr; // names it in the table's other calls
    std::vector<Expert *> held      = {};
    Stream *              stream    = nullptr; // the rest of its layer, where that does not fit into memory
    int                   n_threads = 1;       // that compute
    std::string           error     = {};      // why the last release() returned false
};

} // namespace pyorch
