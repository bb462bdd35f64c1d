// The table's record of one expert, and of one context.

#pragma once

#include "loading/loader.h"
#include "residency/seats.h"

#include <atomic>
#include <string>
#include <vector>

namespace pyorch {

// Why an expert has memory: what it was read for, until a layer uses it. It says who may take the memory.
enum class ReadFor : uint8_t {
    DEMAND,   // a layer computes with it, or it is pinned
    SCAN,     // used by wide batches only
    ORDER,    // read ahead by name, not used yet
    PROMPT,   // read ahead for a prompt's next layer, not used yet
    GUESS,    // read ahead on a guess, for the next pass of its layer
    DEFERRED, // read after others had replaced it, when no other read waited
};

// Resident: in the form that kernels compute with. guess_of: the context of a guess, until its pass has come.
struct Expert : Seat {
    static constexpr uint32_t FAILED = 1u << 31;

    ReadFor read_for  = ReadFor::DEMAND;
    Form    kept      = Form::ABSENT; // the pool that has all its stored parts as well (pools.h)
    bool    abandoned = false;        // loading, but no longer wanted: the load ends with the current request
    bool    elsewhere = false;        // another server computes it now: it is not read ahead here
    bool    above     = false;        // a tier above has it, or gets it: it is evicted first here

    // Read by the kernels without the mutex: one bit for each matrix that was read, or FAILED. An address is valid once
    // its bit was seen.
    std::atomic<uint32_t> ready{ 0 };
    const char *          addr[PYORCH_MAX_ROLES] = {};

    Slot        slot;     // its memory, from the begin of its load
    Load        load;     // its layer and id; more while it is loading
    uint64_t    uses = 0; // counted ones: hits and misses
    std::string error;    // the reason of FAILED

    // Its load began before a layer needed it, and no layer has used it since.
    bool unasked() const {
        return read_for == ReadFor::ORDER || read_for == ReadFor::PROMPT || read_for == ReadFor::GUESS;
    }

    // It was read ahead, and the use is still to come.
    bool read_ahead() const { return unasked() && (read_for != ReadFor::GUESS || guess_of); }
    bool guessed() const { return read_for == ReadFor::GUESS && guess_of; }
    bool scanned() const { return read_for == ReadFor::SCAN || read_for == ReadFor::PROMPT; }

    // Whether eviction would lose bytes that were read ahead.
    bool read_in_vain() const { return read_ahead() && (resident() || load.read > 0 || load.in_flight > 0); }

    // A layer of few tokens uses it, too.
    void not_scanned() {
        read_for = read_for == ReadFor::SCAN ? ReadFor::DEMAND :
            read_for == ReadFor::PROMPT      ? ReadFor::ORDER :
                                               read_for;
    }

    bool failed() const { return ready.load(std::memory_order_relaxed) & FAILED; }
};

struct Stream;

// The experts that one context holds. A context computes one layer at a time.
struct Owner {
    const void *          context   = nullptr; // the key of the context in the table's other calls
    std::vector<Expert *> held      = {};
    Stream *              stream    = nullptr; // the rest of its layer, if that does not fit into memory
    int                   n_threads = 1;       // compute threads
    std::string           error     = {};      // the reason why the last release() returned false
};

// The experts that a layer needs for one ubatch: ascending, each once.
struct Demand {
    // A batch this wide is a prompt: it uses most experts once, and says little about the experts of decoding.
    static constexpr int SCAN_TOKENS = 8;

    const std::vector<int> & experts; // the layer computes with them: they are held
    const std::vector<int> & asked;   // the router's choice: these count as used, even if others replace them
    int                      n_tokens;
    bool                     continues = false; // see Visit
    bool                     own       = true;  // the tokens are of this server
    bool                     learned   = false; // learn_visit() was called for it
    bool                     counted   = true;  // as hits and misses
    std::vector<int>         rows      = {};    // rows of the ubatch for each of `experts`; empty: one each

    bool scans() const { return n_tokens >= SCAN_TOKENS; }
};

} // namespace pyorch
