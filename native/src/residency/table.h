// The residency table: what layers, the prefetcher, readers and everybody else ask of host memory, under one mutex.
//
// It is made of parts that know nothing of threads, but for a `const Locked &` on its way to the loader; each says what
// holds in it:
//
//     residents.h     which experts are in memory, and which layers hold them (seats.h)
//     room.h          the budget, and what goes when something else comes
//     stored_parts.h  what stays of compressed experts
//     read_ahead.h    what is read before a layer needs it
//     stream.h        layers that do not fit into memory whole
//     learning.h      what visits of layers teach, under a mutex of its own
//
// What takes several of them is decided here: whether a layer fits or is streamed (try_acquire), and whether a batch
// orders the next layer (acquire; from how many tokens on it is a prompt: Demand::SCAN_TOKENS in expert.h).
//
// One mutex guards all of them but the two fields of an expert that the kernels read (see unlocked()); it is never held
// across I/O or compute.
//
// A layer that runs holds its experts from acquire() to release(). A layer gets all its experts at once, or
// holds none and waits for others to release theirs; so contexts that share an engine cannot wait for each other in a
// circle. What does not fit into the budget at all is streamed: the layer gets a window, through which the rest passes.
//
// Nothing that a layer of a token asks for costs more in a model with more layers or experts, but for a comparison for
// each layer where memory is needed: what is looked up by expert is an array, what is sought is an index
// (eviction_order.h, guesses.h).

#pragma once

#include "banks/bank.h"
#include "base/mutex.h"
#include "loading/loader.h"
#include "residency/learning.h"
#include "residency/read_ahead.h"
#include "residency/room.h"
#include "residency/stream.h"
#include "residency/tier.h"

#include <memory>
#include <string>
#include <vector>

namespace pyorch {

class Table : public Tier, private Loader::Orders {
public:
    // The bank brings the budget. policies: that can be chosen. Throws Failure: PYORCH_BUDGET below the map's floor,
    // PYORCH_INVALID for a policy that is none of them.
    Table(const ModelMap & map, std::unique_ptr<Bank> bank, std::unique_ptr<Source> source, const Codec & codec,
        const pyorch_config & config, const Policies & policies = policy_list());
    ~Table() override; // REQUIRES: no reader is left

    // For the compute threads.

    // Holds the experts of a layer for owner and queues what is absent. Sleeps only while others hold
    // so much that this layer does not fit beside it.
    void acquire(Owner & owner, int layer, const Demand & demand);

    // Whether what a layer waits for is ordered by how many rows each expert computes (Demand::rows).
    bool orders_by_rows(int layer) const;

    // Experts that a layer was just asked for, and that others stand in for. Each is read when nothing else is wanted,
    // where it is worth more than what must go for it. In place of what was deferred for the layer before.
    void defer(int layer, const std::vector<int> & experts);

    // Gives back all that owner holds. False if one of them could not be read.
    bool release(Owner & owner);

    // The context is gone: gives back what it holds, and forgets what was guessed for it.
    void forget(Owner & owner);

    // Address of one matrix of an expert that owner acquired. wait: sleep until it is there; otherwise null
    // if it is not. Of an expert that could not be read: readable zeros.
    // REQUIRES where owner has a stream: each of its n_threads, told apart by any address of theirs, asks for experts
    // of one role in ascending order, and then no more for those that it was given an address of before; all have done
    // so when the first asks for another role.
    const char * address(
        const Owner & owner, int layer, int expert, int role, bool wait, const void * thread = nullptr);

    // other holds an expert beside owner, until unshare(): its bytes stay where they are. False, and nothing is held,
    // where owner does not hold it whole.
    bool share(const Owner & owner, int layer, int expert, Owner & other);
    bool share_resident(int layer, int expert, Owner & other); // the same of any that is resident
    void unshare(Owner & other);

    // Whether these fit into memory together, beside what is reserved in other layers: else some of them are streamed,
    // and which, depends on what is there.
    bool fits(int layer, const std::vector<int> & experts) {
        MutexLock lock(mutex);
        return room.fits(layer, experts);
    }

    // Whether an address is that of a matrix, and not of the zeros that stand for one that could not be read.
    bool readable(const char * address) const { return address != zeros; }

    // mask[n_expert]: 1 for each expert of the layer that is resident; loading[n_expert]: for each that is on its way.
    void resident(int layer, std::vector<uint8_t> & mask, std::vector<uint8_t> * loading = nullptr);

    // For an absent expert of the layer, in seconds: until what is demanded is read, and for the expert itself; and the
    // share of the time in which layers lately waited for reads. False before the first read.
    bool read_time(int layer, double & queued, double & expert, double & busy);

    // For the readers.
    Loader & loader() { return loads; }

    // For the prefetcher.

    using Want = ReadAhead::Want;

    // What the next pass of a context through a layer will probably need, as was known when its layer `from` came (-1:
    // when its ubatch began); replaces what was wanted for it before. Read behind all demand and only while nothing
    // that was used in the layers' last passes must go for it; forgotten when the layer comes, and not even noted if
    // it has come meanwhile.
    void want(const void * context, int layer, int from, std::vector<Want> & wants);

    // A guess costs more than it gains, unless it comes true more often than this. Of the time that reading the expert
    // takes: it gains the share that guesses have been read to when their pass comes. It costs the processor what so
    // much reading costs it, for compute threads may want all processors; memory, the share of experts that are missed
    // at once after they had to go; and where it is wrong, at most the rest of a small request that a demand meets,
    // half of it on average.
    double break_even();

    // Of the experts that were absent when layers of decoding tokens came, or would have been but for guesses, since the
    // beginning.
    double decoding_absent_bytes() {
        MutexLock lock(mutex);
        return absent_bytes;
    }

    // probability[n_expert]: with which that pass will need each expert of the layer. Ignored if it has come meanwhile.
    void expect(const void * context, int layer, int from, const std::vector<float> & probability) {
        MutexLock lock(mutex);
        ahead.expect(context, layer, from, probability);
    }

    // For whoever knows the graph: the layers that a decode passes, ascending; all, until told. Others are not read
    // ahead, neither for a prompt nor on a guess.
    void set_executed(const std::vector<int> & layers) {
        MutexLock lock(mutex);
        values.set_executed(layers);
    }

    // elsewhere[n_expert]: nonzero for experts of the layer that another server computes now. They are read here only
    // if a layer needs them after all, or by name.
    void set_elsewhere(int layer, const std::vector<uint8_t> & elsewhere);

    // there[n_expert]: nonzero for experts of the layer that a tier above has or is getting. No guess reads them, and
    // they go first, though not before something needs their memory.
    void set_above(int layer, const std::vector<uint8_t> & there);

    // For a replay: when an expert will be used next, in layers computed (see EvictionPolicy).
    void foresee(int layer, int expert, uint64_t next_use) {
        MutexLock lock(mutex);
        values.foresee(layer, expert, next_use);
    }

    // For everybody else. Layers are given by il; throws Failure.

    void prefetch(int il, const int32_t * experts, int n);
    void pin(int il, const int32_t * experts, int n);
    void offer(int il, int expert, const void * bytes, uint64_t size); // see pyorch_offer
    void unpin(int il, const int32_t * experts, int n);
    void evict(int il, const int32_t * experts, int n);
    void set_budget(uint64_t bytes) {
        change([&]() REQUIRES(mutex) { room.set_budget(mutex.locked(), bytes); });
    }

    // Whether there is room for all experts, here and above, and nearly all are there.
    bool has_nearly_all();

    // Of a layer each, that passed without asking.
    void count_tokens(uint64_t n);

    void set_pools(const PoolShares & shares) {
        change([&]() REQUIRES(mutex) { room.set_shares(mutex.locked(), shares); });
    } // see Room::set_shares

    void set_limits(int layer, int min, int max) override {
        change([&]() REQUIRES(mutex) { room.set_limits(mutex.locked(), layer, min, max); });
    }

    void set_uses(int il, const double * uses, int n); // see pyorch_set_uses

    void set_policy(pyorch_policy policy) override {
        learning.change_policy([&](const Locked & locked) {
            mutex.assert_held(locked);
            values.set_policy(policy);
        });
    }

    // See Learning.
    template <typename Use>
    void with_learned(Use use) {
        learning.with_learned(use);
    }

    // For a tier above, whose experts have the same policy: learns from a layer that comes now, before acquire() is
    // told of it. Returns the values of the layer; none, where the policy learns nothing.
    std::vector<double> learn_visit(const Visit & visit) { return learning.visit(visit); }

    void        get_residency(int il, uint8_t * mask, int n);
    void        mark(int layer, std::vector<uint8_t> & mask) override;
    void        add_stats(int layer, pyorch_stats & stats) override;
    void        get_snapshot(pyorch_snapshot & snapshot); // see pyorch_get_snapshot
    void        reset_stats() override;
    void        wait_idle();
    std::string last_error() {
        MutexLock lock(mutex);
        return error;
    }

    // Index into the layers with experts.
    int layer_index(int il) const { return map.index_of(il); }

    const ModelMap map;

private:
    Mutex   mutex;
    CondVar arrived; // for compute threads: a matrix
    CondVar space;   // for acquire: something was released or finished
    CondVar idle;

    std::unique_ptr<Bank> bank PT_GUARDED_BY(mutex);
    Loader                loads;

    Residents   residents GUARDED_BY(mutex);
    Values &    values GUARDED_BY(mutex) = residents.values;
    StoredParts stored GUARDED_BY(mutex);
    Room        room GUARDED_BY(mutex);
    ReadAhead   ahead GUARDED_BY(mutex);
    Streams     streams GUARDED_BY(mutex);
    Learning    learning;

    const pyorch_recovery recovery;

    uint64_t    n_arrived GUARDED_BY(mutex)    = 0; // layers that came to acquire(), served in that order
    uint64_t    n_served GUARDED_BY(mutex)     = 0;
    double      absent_bytes GUARDED_BY(mutex) = 0; // see decoding_absent_bytes()
    std::string error GUARDED_BY(mutex);

    int          n_waiting GUARDED_BY(mutex)  = 0; // compute threads asleep in address()
    uint64_t     wait_begin GUARDED_BY(mutex) = 0;
    int          wait_layer GUARDED_BY(mutex) = 0;  // of the first of them
    pyorch_stats totals GUARDED_BY(mutex)     = {}; // what is not counted by layer

    char *   zeros      = nullptr;
    uint64_t zeros_size = 0;

    // Does what may change what is to be read, or what memory there is.
    template <typename Do>
    void change(Do act) {
        {
            MutexLock lock(mutex);
            act();
        }
        space.notify_all();
        loads.wake();
    }

    template <typename Change>
    void for_each(int il, const int32_t * experts, int n, Change change);

    // For kernels, which read `ready` of an expert, and then `addr`, without the mutex. Experts never move.
    Expert & unlocked(int layer, int expert) NO_THREAD_SAFETY_ANALYSIS { return residents.expert(layer, expert); }

    // Loader::Orders
    bool   order_ahead(const Locked & locked) override;
    bool   order_guess(const Locked & locked) override;
    Staged stage(const Locked & locked, Load & load) override;
    void   published(const Locked & locked, Load & load, int role, const char * address) override;
    void   failed(const Locked & locked, Load & load, const std::string & sentence) override;
    void   finished(const Locked & locked, Load & load) override;
    void   decodable(const Locked & locked) override;

    void expert_finished(Expert & e) REQUIRES(mutex);

    bool share(Expert & e, Owner & other) REQUIRES(mutex);
    bool try_acquire(Owner & owner, int layer, const Demand & demand, bool & counted) REQUIRES(mutex);
    bool release_held(Owner & owner) REQUIRES(mutex);
    void count_uses(int layer, const Demand & demand, const std::vector<int> & streamed) REQUIRES(mutex);
    void count_absent(const Residents::Layer & l, const Expert & e) REQUIRES(mutex);

    void count(int only, pyorch_stats & out) REQUIRES(mutex);
    void note_visit(const Owner & owner, int layer, const Demand & demand) REQUIRES(mutex);

    template <typename Condition>
    void wait_for_arrival(int layer, Condition there) REQUIRES(mutex);

    const char * pass_by(Stream & s, int expert, int role, bool wait, const void * thread, int n_threads);

    bool is_idle() const REQUIRES(mutex) { return loads.idle(mutex.locked()) && ahead.is_idle(); }

    // Asleep for memory: what goes for it must not be taken for anything else before it wakes.
    bool layer_waits() const REQUIRES(mutex) { return n_served != n_arrived; }
};

} // namespace pyorch
