// The residency table: which experts are in host memory. Layers, the prefetcher and readers call it. One mutex guards
// it.
//
// Its parts know no threads; they pass a `const Locked &` to the loader:
//
//     residents.h     the experts in memory, and the layers that hold them (seats.h)
//     room.h          the budget, and the choice of victims
//     stored_parts.h  the stored parts of compressed experts that stay
//     read_ahead.h    the reads before a layer needs them
//     stream.h        layers that do not fit into memory whole
//     learning.h      the statistics of the layers' visits, under a mutex of its own
//
// The table makes the decisions that need several parts: whether a layer fits or is streamed (try_acquire), and whether
// a batch orders the next layer (acquire; Demand::SCAN_TOKENS in expert.h says how many tokens make a prompt).
//
// The mutex guards everything but two fields of an expert, which the kernels read (see unlocked()). No thread holds it
// during I/O or computing.
//
// A running layer holds its experts from acquire() to release(). It gets all of them at once; otherwise it holds none,
// and waits until other layers release theirs. So contexts that share an engine never wait for each other in a circle.
// A layer that does not fit into the budget is streamed: its experts pass through a window of slots.
//
// The cost of a token's layer does not grow with the model: experts are looked up in arrays, and searched in indices
// (eviction_order.h, guesses.h). Only a search for memory compares the layers once.

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
    // The bank has the budget. policies: the policies that may be chosen. Throws Failure: PYORCH_BUDGET below the
    // map's floor, PYORCH_INVALID for an unknown policy.
    Table(const ModelMap & map, std::unique_ptr<Bank> bank, std::unique_ptr<Source> source, const Codec & codec,
        const pyorch_config & config, const Policies & policies = policy_list());
    ~Table() override; // REQUIRES: no reader is left

    // For the compute threads.

    // Holds the experts of a layer for owner, and queues the absent ones. Sleeps only while other owners hold so much
    // that this layer does not fit.
    void acquire(Owner & owner, int layer, const Demand & demand);

    // Whether reads of the layer are ordered by the rows that each expert computes (Demand::rows).
    bool orders_by_rows(int layer) const;

    // Experts that a layer just asked for, and that were replaced. Each is read when no other read waits, and if it is
    // worth more than its victim. They replace the deferred experts of the layer before.
    void defer(int layer, const std::vector<int> & experts);

    // Releases all that owner holds. False if one of its experts could not be read.
    bool release(Owner & owner);

    // The context is gone: releases what it holds, and deletes its guesses.
    void forget(Owner & owner);

    // Address of one matrix of an expert that owner acquired. wait: sleep until it is read; otherwise null if it is
    // absent. Points at readable zeros if the expert could not be read.
    // REQUIRES if owner has a stream: each of its n_threads (told apart by any address of theirs) asks for the experts
    // of one role in ascending order. It no longer uses the addresses that it got before. All threads have ended one
    // role when the first asks for another role.
    const char * address(
        const Owner & owner, int layer, int expert, int role, bool wait, const void * thread = nullptr);

    // other holds an expert as well as owner, until unshare(); its bytes do not move. False, and nothing is held, if
    // owner does not hold the whole expert.
    bool share(const Owner & owner, int layer, int expert, Owner & other);
    bool share_resident(int layer, int expert, Owner & other); // the same for any resident expert
    void unshare(Owner & other);

    // Whether these experts fit into memory together, without the reserved memory of other layers. Otherwise some of
    // them are streamed; which ones depends on the state of memory.
    bool fits(int layer, const std::vector<int> & experts) {
        MutexLock lock(mutex);
        return room.fits(layer, experts);
    }

    // Whether an address points at a matrix, and not at zeros in place of an unreadable one.
    bool readable(const char * address) const { return address != zeros; }

    // mask[n_expert]: 1 for each resident expert of the layer; loading[n_expert]: 1 for each expert that is being read.
    void resident(int layer, std::vector<uint8_t> & mask, std::vector<uint8_t> * loading = nullptr);

    // For an absent expert of the layer, in seconds: the time until the queued demand is read, and the time to read the
    // expert. busy: the share of recent time in which layers waited for reads. False before the first read.
    bool read_time(int layer, double & queued, double & expert, double & busy);

    // For the readers.
    Loader & loader() { return loads; }

    // For the prefetcher.

    using Want = ReadAhead::Want;

    // The experts that the next pass of a context through a layer will probably need, as of layer `from` (-1: as of the
    // begin of the ubatch). It replaces the earlier call for that pass. They are read behind all demand. A victim must
    // not have been used in the last pass of its layer. The call ends when the layer comes; it does nothing if the
    // layer has come already.
    void want(const void * context, int layer, int from, std::vector<Want> & wants);

    // The precision below which a guess costs more than it gains, in units of the time to read the expert. It gains the
    // share that was read before its pass came. It costs processor time for the read, since compute threads may need
    // every processor. It costs memory: the share of victims that are missed at once. A wrong guess delays demand by
    // the rest of one small request, half of it on average.
    double break_even();

    // Bytes, since the begin, of the experts that were absent when layers of decoded tokens came. Experts that only a
    // guess had made resident count too.
    double decoding_absent_bytes() {
        MutexLock lock(mutex);
        return absent_bytes;
    }

    // probability[n_expert]: that the pass will use each expert of the layer. Ignored if the layer has come already.
    void expect(const void * context, int layer, int from, const std::vector<float> & probability) {
        MutexLock lock(mutex);
        ahead.expect(context, layer, from, probability);
    }

    // The layers that a decode passes, ascending; the caller knows the graph. Until this call: all. Other layers are
    // not read ahead, neither for a prompt nor on a guess.
    void set_executed(const std::vector<int> & layers) {
        MutexLock lock(mutex);
        values.set_executed(layers);
    }

    // elsewhere[n_expert]: nonzero for experts of the layer that another server computes now. They are read here only
    // on demand or by name.
    void set_elsewhere(int layer, const std::vector<uint8_t> & elsewhere);

    // is_above[n_expert]: nonzero for experts of the layer that are on a tier above, or on the way to it. No guess reads
    // them, and they are evicted first when memory is needed.
    void set_above(int layer, const std::vector<uint8_t> & is_above);

    // For a replay: when an expert will be used next, in computed layers (see EvictionPolicy).
    void foresee(int layer, int expert, uint64_t next_use) {
        MutexLock lock(mutex);
        values.foresee(layer, expert, next_use);
    }

    // For all other callers. Layers are given by il; throws Failure.

    void prefetch(int il, const int32_t * experts, int n);
    void pin(int il, const int32_t * experts, int n);
    void offer(int il, int expert, const void * bytes, uint64_t size); // see pyorch_offer
    void unpin(int il, const int32_t * experts, int n);
    void evict(int il, const int32_t * experts, int n);
    void set_budget(uint64_t bytes) {
        change([&]() REQUIRES(mutex) { room.set_budget(mutex.locked(), bytes); });
    }

    // Whether all experts fit, here and on the tier above, and nearly all are resident.
    bool has_nearly_all();

    // Counts tokens of a layer that passed without asking.
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

    // For a tier above, whose experts have the same policy: learns from a layer that comes now. Call it before
    // acquire(). Returns the values of the layer; empty if the policy learns nothing.
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
    CondVar arrived; // for compute threads: a matrix was read
    CondVar space;   // for acquire: an expert was released or read
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

    uint64_t    n_arrived GUARDED_BY(mutex)    = 0; // calls of acquire(), served in that order
    uint64_t    n_served GUARDED_BY(mutex)     = 0;
    double      absent_bytes GUARDED_BY(mutex) = 0; // see decoding_absent_bytes()
    std::string error GUARDED_BY(mutex);

    int          n_waiting GUARDED_BY(mutex)  = 0; // compute threads asleep in address()
    uint64_t     wait_begin GUARDED_BY(mutex) = 0;
    int          wait_layer GUARDED_BY(mutex) = 0;  // of the first sleeper
    pyorch_stats totals GUARDED_BY(mutex)     = {}; // counts without a layer

    char *   zeros      = nullptr;
    uint64_t zeros_size = 0;

    // Makes a change to orders or memory, and then wakes the threads that wait for either.
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
    void wait_for_arrival(int layer, Condition is_met) REQUIRES(mutex);

    const char * pass_by(Stream & s, int expert, int role, bool wait, const void * thread, int n_threads);

    bool is_idle() const REQUIRES(mutex) { return loads.idle(mutex.locked()) && ahead.is_idle(); }

    // A layer sleeps for memory: the memory that is freed for it must not be used otherwise before it wakes.
    bool layer_waits() const REQUIRES(mutex) { return n_served != n_arrived; }
};

} // namespace pyorch
