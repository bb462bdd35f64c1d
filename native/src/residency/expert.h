// What the table knows of one expert, and of one context.

#pragma once

#include "loading/loader.h"
#include "residency/seats.h"

#include <atomic>
#include <string>
#include <vector>

namespace pyorch {

// Why an expert has memory: what it was read for, and once a layer used it, that. So it says who may take the memory.
enum class ReadFor : uint8_t {
    DEMAND,   // a layer computes with it, or it is pinned
    SCAN,     // only ever used by wide batches
    ORDER,    // read ahead by name, not used yet
    PROMPT,   // the same for a prompt's next layer
    GUESS,    // read ahead on a guess, for the next pass of its layer
    DEFERRED, // others stood in for it, and nothing else was to be read
};

// Resident: in the form that kernels compute with. guess_of: of a guess, until that pass has come.
struct Expert : Seat {
    static constexpr uint32_t FAILED = 1u << 31;

    ReadFor read_for  = ReadFor::DEMAND;
    Form    kept      = Form::ABSENT; // the pool that has its stored parts, whole ones, beside that (pools.h)
    bool    abandoned = false;        // loading, but not wanted any more: the load ends with the request under way
    bool    elsewhere = false;        // another server computes it now, or must: it is not read ahead here
    bool    above     = false;        // a tier above has it, or is getting it: it goes first here

    // Read by the kernels without the mutex: a bit for each matrix that is there, or FAILED. An
    // address is valid once its bit was seen.
    std::atomic<uint32_t> ready{ 0 };
    const char *          addr[PYORCH_MAX_ROLES] = {};

    Slot        slot;     // its memory, from the beginning of its load
    Load        load;     // its layer and id; and while it is loading, all of that
    uint64_t    uses = 0; // that were counted: hits and misses
    std::string error;    // why it is FAILED

    // Its load began before a layer needed it, and none did since.
    bool unasked() const {
        return read_for == ReadFor::ORDER || read_for == ReadFor::PROMPT || read_for == ReadFor::GUESS;
    }

    // The use that it was read ahead for is still to come.
    bool read_ahead() const { return unasked() && (read_for != ReadFor::GUESS || guess_of); }
    bool guessed() const { return read_for == ReadFor::GUESS && guess_of; }
    bool scanned() const { return read_for == ReadFor::SCAN || read_for == ReadFor::PROMPT; }

    // Whether something was read ahead that would be lost now.
    bool read_in_vain() const { return read_ahead() && (resident() || load.read > 0 || load.in_flight > 0); }

    // Not for a wide batch alone.
    void not_scanned() {
        read_for = read_for == ReadFor::SCAN ? ReadFor::DEMAND :
            read_for == ReadFor::PROMPT      ? ReadFor::ORDER :
                                               read_for;
    }

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

// What a layer needs for one ubatch: experts ascending, each once.
struct Demand {
    // A batch this wide is a prompt: it touches most experts once, and says little about which ones decoding will need.
    static constexpr int SCAN_TOKENS = 8;

    const std::vector<int> & experts; // that it computes with: they are held
    const std::vector<int> & asked;   // that its router chose: they count as used, whatever took their place
    int                      n_tokens;
    bool                     continues = false; // see Visit
    bool                     own       = true;  // its tokens are this server's: no other one asked
    bool                     learned   = false; // learn_visit() was told of it
    bool                     counted   = true;  // as hits and misses
    std::vector<int>         rows      = {};    // of the ubatch that each of `experts` computes; empty: one each

    bool scans() const { return n_tokens >= SCAN_TOKENS; }
};

} // namespace pyorch
