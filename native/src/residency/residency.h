// The residency table: which experts are in memory, who uses them, what is read next.
//
// It is the only owner of the budget. One mutex guards everything but the two fields of an expert
// that the kernels read; it is never held across I/O or compute.
//
// Life of an expert:
//
//     absent --start_load--> loading --last read ends--> resident --drop--> absent
//
// A layer that runs holds its experts (in_use) from acquire() to release(); what is held or pinned is
// never dropped. A layer gets all its experts at once or waits for others to release theirs, so
// contexts that share an engine cannot wait for each other in a circle.
//
// Reads are cut into requests. Demand is served first, in the order in which the kernels will need it
// (all up matrices of the layer, then all gate, then all down, experts ascending, as mul_mat_id goes
// through them). What is read ahead gets its memory only when a reader has nothing better to do.

#pragma once

#include "banks/block_pool.h"
#include "residency/eviction.h"
#include "model/model_map.h"
#include "loading/source.h"

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace pyorch {

struct Expert {
    enum State : uint8_t { ABSENT, LOADING, RESIDENT };

    static constexpr uint32_t FAILED = 1u << 31;

    // Read by the kernels without the mutex: a bit for each matrix that is there, or FAILED. An
    // address is valid once its bit was seen.
    std::atomic<uint32_t>     ready{0};
    const char *              addr[PYORCH_MAX_ROLES] = {};

    int      layer = 0; // index into the layers with experts
    int      id    = 0;
    State    state      = ABSENT;
    bool     pinned     = false;
    bool     scanned    = false; // only ever used by wide batches: goes before all others
    bool     read_ahead = false; // and not used yet
    bool     predicted  = false; // read ahead on a guess, for the next pass of its layer
    int      in_use     = 0;     // by running layers
    int      in_flight  = 0;     // requests a reader works on
    int      pending[PYORCH_MAX_ROLES] = {}; // requests not yet finished
    char *   block  [PYORCH_MAX_ROLES] = {};
    Usage    usage;

    int pending_total() const { return pending[0] + pending[1] + pending[2]; }
};

// What one context holds. A context computes one layer at a time.
struct Owner {
    std::vector<Expert *> held;
};

struct ReadRequest {
    Expert * expert;
    int      role;
    int      file;
    uint64_t offset;
    uint64_t size;   // to read
    uint64_t needed; // of them, the rest is alignment
    char *   buf;
};

// What a read ahead may not take memory from.
struct Spared {
    uint64_t used_after       = UINT64_MAX; // experts used later than this
    float    more_likely_than = INFINITY;   // experts whose forecast is higher
};

class ResidencyTable {
public:
    ResidencyTable(const ModelMap & map, std::unique_ptr<Source> source, const pyorch_config & config);
    ~ResidencyTable(); // REQUIRES: no reader runs

    // For the compute threads.

    // Holds the experts of a layer for owner and queues what is absent. Sleeps only while others hold
    // so much that this layer does not fit beside it. experts: ascending, each once.
    void acquire(Owner & owner, int layer, const std::vector<int> & experts, int n_tokens);

    // mask[n_expert]: 1 for each expert of the layer that is resident.
    void resident(int layer, std::vector<uint8_t> & mask);

    // Of one reader, lately; 0 before the first read.
    double read_bytes_per_second();

    // Gives back all that owner holds. False if one of them could not be read.
    bool release(Owner & owner);

    // Address of one matrix of an expert that is held. wait: sleep until it is there; otherwise null
    // if it is not. Of an expert that could not be read: readable zeros.
    const char * address(int layer, int expert, int role, bool wait);

    // For the readers.

    // The next request, or false when stop() was called. Sleeps while there is none.
    bool next_read(ReadRequest & request);

    // The same, but false at once while there is none.
    bool try_next_read(ReadRequest & request);

    // result: bytes read or negative errno
    void finish_read(const ReadRequest & request, int64_t result, uint64_t ns);
    void stop();

    Source & bytes() { return *source; }

    // For the prefetcher.

    struct Want {
        int    expert;
        double probability;
        bool   wanted; // in: read it, if it is absent
        bool   absent; // out
    };

    // What the next pass of a layer will probably need, as was known when layer `from` came (-1: when a ubatch began);
    // replaces what was wanted for it before. Read behind all demand and only while nothing that was used in the last
    // token must go for it; forgotten when the layer comes, and not even noted if it has come meanwhile.
    void want(int layer, int from, std::vector<Want> & wants);

    // probability[n_expert]: with which the next pass of a layer will need each of its experts.
    void expect(int layer, const std::vector<float> & probability);

    // For a replay, in which one thread is everybody.

    // Called in place of sleeping in acquire(): ends one read.
    void set_waiter(std::function<void()> waiter);

    // When an expert will be used next, in layers computed (see EvictionPolicy).
    void foresee(int layer, int expert, uint64_t next_use);

    // For everybody else. Layers are given by il; throws Failure.

    void     prefetch(int il, const int32_t * experts, int n);
    void     pin     (int il, const int32_t * experts, int n);
    void     unpin   (int il, const int32_t * experts, int n);
    void     evict   (int il, const int32_t * experts, int n);
    void     set_budget(uint64_t bytes);
    void     set_policy(pyorch_policy policy);
    void     set_layer_limits(int il, int min, int max);
    void     get_residency(int il, uint8_t * mask, int n);
    void     get_stats(int il, pyorch_stats & stats);
    void     reset_stats();
    void     wait_idle();
    std::string last_error();

    // Index into the layers with experts.
    int      layer_index(int il) const;

    const ModelMap map;

private:
    struct Layer {
        std::unique_ptr<Expert[]> experts;
        int          n_expert;
        int          n_loaded = 0; // loading or resident
        int          min      = 0;
        int          max;
        uint64_t     slot_bytes;
        pyorch_stats stats = {};
    };

    struct Guess {
        Expert * expert;
        double   probability;
    };

    std::unique_ptr<Source>         source;
    std::unique_ptr<EvictionPolicy> policy;
    uint64_t                        read_bytes;

    std::mutex              mutex;
    std::condition_variable work;    // for readers: a request, or memory for one
    std::condition_variable arrived; // for compute threads: a matrix
    std::condition_variable space;   // for acquire: something was released or finished
    std::condition_variable idle;
    std::function<void()>   waiter;  // in place of waiting for space

    BlockPool               pool;
    std::vector<Layer>      layers;
    std::deque<ReadRequest> demand;
    std::deque<ReadRequest> ahead;         // memory is allocated
    std::deque<Expert *>    ahead_wanted;  // memory is not
    std::vector<Guess>      guesses;       // nor here, and they may never get any
    int                     n_predicted = 0; // experts with the flag
    int                     passing     = 0; // the layer that was last acquired
    int                     last_layer  = -1; // that is ever acquired: those that a decode does not pass come behind it
    uint64_t                held_bytes  = 0; // of experts that are in use or pinned
    int                     n_in_use    = 0;
    int                     n_in_flight = 0;
    bool                    stopped     = false;
    uint64_t                now         = 0; // layers computed
    std::string             error;

    int                     n_waiting = 0; // compute threads asleep in address()
    uint64_t                wait_begin = 0;
    pyorch_stats            totals = {};   // what is not counted by layer
    double                  read_rate = 0; // bytes a second, fading average

    char *                  zeros      = nullptr;
    uint64_t                zeros_size = 0;

    Layer &  layer_of(const Expert & e) { return layers[e.layer]; }
    Expert & expert_at(int layer, int32_t id);

    template <typename Change>
    void     for_each(int il, const int32_t * experts, int n, Change change);

    void hold(Expert & e);
    void unhold(Expert & e);
    void release_held(Owner & owner, bool & failed);
    bool start_load(Expert & e, std::deque<ReadRequest> & queue);
    void drop(Expert & e);
    void unqueue(Expert & e);
    void take_over_ahead(const std::vector<Expert *> & experts);
    bool make_room(uint64_t bytes, int layer, bool for_demand, const Spared & spared = {});
    void shrink_layer(int layer, int n);
    bool pop_read(ReadRequest & request);
    bool next_ahead();
    bool next_guess();
    void settle_guesses(int layer);
    void want_layer_ahead(int layer);
    std::vector<int> reserved() const;
    uint64_t needed_budget(const std::vector<int> & reserved) const;
    bool is_idle() const;
};

} // namespace pyorch
