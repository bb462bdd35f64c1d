// The residency table: which experts are in memory, in which form and where, and who uses them.
//
// Only the table moves an expert from one state to another, and takes and gives its memory. One mutex guards
// everything but the two fields of an expert that the kernels read; it is never held across I/O or compute.
//
// Life of an expert:
//
//     absent --start_load--> loading --its last request ends--> resident in a form --drop--> absent
//
// That is about what kernels compute with. Beside it, stored parts of a compressed expert may be in memory (pools.h): a
// load has them all, and when it ends, those that the expert's pool wants stay.
//
// A layer that runs holds its experts (in_use) from acquire() to release(); what is held or pinned is
// never dropped. A layer gets all its experts at once, or holds none and waits for others to release theirs; so
// contexts that share an engine cannot wait for each other in a circle. What does not fit into the budget at all is
// streamed: the layer gets a window, through which the rest passes (stream.h).
//
// What is read ahead gets its memory only when a reader has nothing better to do, and what is read on a guess only when
// no reader has anything to do. A guess whose pass went without it is abandoned: the request under way ends, and no
// other is begun.
//
// Nothing that a layer of a token asks for costs more in a model with more layers or experts, but for a comparison for
// each layer where memory is needed: what is looked up by expert is an array, what is sought is an index (victims.h,
// guesses.h).

#pragma once

#include "banks/bank.h"
#include "loading/loader.h"
#include "residency/eviction_order.h"
#include "residency/expert.h"
#include "residency/guesses.h"
#include "residency/policies/learned_value.h"
#include "residency/pools.h"
#include "residency/stream.h"

#include <atomic>
#include <climits>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace pyorch {

// What a layer needs for one ubatch. Experts ascending, each once.
struct Demand {
    // A batch this wide is a prompt: it touches most experts once, and says little about which ones decoding will need.
    static constexpr int SCAN_TOKENS = 8;

    const std::vector<int> & experts; // that it computes with: they are held
    const std::vector<int> & asked;   // that its router chose: they count as used, whatever took their place
    int                      n_tokens;
    bool                     continues = false; // see Visit
    bool                     own       = true;  // its tokens are this server's: no other one asked
    bool                     learned   = false; // learn_visit() was told of it

    bool scans() const { return n_tokens >= SCAN_TOKENS; }
};

class Table : private Loader::Orders {
public:
    // The bank brings the budget. policies: that can be chosen. Throws Failure: PYORCH_BUDGET below the map's floor,
    // PYORCH_INVALID for a policy that is none of them.
    Table(const ModelMap & map, std::unique_ptr<Bank> bank, std::unique_ptr<Source> source, Codecs codecs,
        const pyorch_config & config, const Policies & policies = policy_list());
    ~Table() override; // REQUIRES: no reader is left

    // For the compute threads.

    // Holds the experts of a layer for owner and queues what is absent. Sleeps only while others hold
    // so much that this layer does not fit beside it.
    void acquire(Owner & owner, int layer, const Demand & demand);

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
    bool fits(int layer, const std::vector<int> & experts);

    // Whether an address is that of a matrix, and not of the zeros that stand for one that could not be read.
    bool readable(const char * address) const { return address != zeros; }

    // mask[n_expert]: 1 for each expert of the layer that is resident; loading[n_expert]: for each that is on its way.
    void resident(int layer, std::vector<uint8_t> & mask, std::vector<uint8_t> * loading = nullptr);

    // Of one reader, lately; 0 before the first read.
    double read_bytes_per_second();

    // For an absent expert of the layer, in seconds: until what is demanded is read, and for the expert itself. False
    // before the first read.
    bool read_time(int layer, double & queued, double & expert);

    // For the readers.
    Loader & loader() { return loads; }

    // For the prefetcher.

    struct Want {
        int    expert;
        double probability;
        bool   wanted; // in: read it, if it is absent
        bool   absent; // out
    };

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

    // What layers of decoding tokens waited for or would have, since the beginning: seconds of reading in which a
    // processor was free to compute.
    struct ReadSeconds {
        double absent; // experts that were absent, or would have been but for guesses
        double saved;  // of them, what had been read on guesses by then
    };
    ReadSeconds read_seconds();

    // probability[n_expert]: with which that pass will need each expert of the layer. Ignored if it has come meanwhile.
    void expect(const void * context, int layer, int from, const std::vector<float> & probability);

    // For whoever knows the graph: the layers that a decode passes, ascending; all, until told. Others are not read
    // ahead, neither for a prompt nor on a guess.
    void set_executed(const std::vector<int> & layers);

    // elsewhere[n_expert]: nonzero for experts of the layer that another server computes now. They are read here only
    // if a layer needs them after all, or by name.
    void set_elsewhere(int layer, const std::vector<uint8_t> & elsewhere);

    // there[n_expert]: nonzero for experts of the layer that a tier above has or is getting. No guess reads them, and
    // they go first, though not before something needs their memory.
    void set_above(int layer, const std::vector<uint8_t> & there);

    // For a replay: when an expert will be used next, in layers computed (see EvictionPolicy).
    void foresee(int layer, int expert, uint64_t next_use);

    // For everybody else. Layers are given by il; throws Failure.

    void prefetch(int il, const int32_t * experts, int n);
    void pin(int il, const int32_t * experts, int n);
    void offer(int il, int expert, const void * bytes, uint64_t size); // see pyorch_offer
    void unpin(int il, const int32_t * experts, int n);
    void evict(int il, const int32_t * experts, int n);
    void set_budget(uint64_t bytes);
    void set_pools(const PoolShares & shares);         // by form, their sum is 1; only compressed experts have forms
    void set_uses(int il, const double * uses, int n); // see pyorch_set_uses
    void set_policy(pyorch_policy policy);

    // Calls use(LearnedValue &) of the policy learned, while nothing is learned. Throws Failure for other policies.
    template <typename Use>
    void with_learned(Use use) {
        std::lock_guard<std::mutex> learning_lock(learning);
        use(learned_value());
        std::lock_guard<std::mutex> lock(mutex);
        publish_all();
    }

    // For a tier above, whose experts have the same policy: learns from a layer that comes now, before acquire() is
    // told of it. Its budget is that of the tier. Calls use(layer, values) for each layer of which the Learner says
    // something else now; never, where the policy learns nothing.
    template <typename Use>
    void learn_visit(Visit visit, Use use) {
        std::lock_guard<std::mutex> learning_lock(learning);
        if (!learner) {
            return;
        }
        learn();
        visit.budget += scarce_bytes();
        learner->visit(visit);
        const bool all = learner->all_changed();
        for (int layer = all ? 0 : visit.layer; layer < (all ? (int) layers.size() : visit.layer + 1); ++layer) {
            use(layer, learner->values(layer));
        }
        std::lock_guard<std::mutex> lock(mutex);
        all ? publish_all() : publish(visit.layer);
    }

    void        set_layer_limits(int il, int min, int max);
    void        get_residency(int il, uint8_t * mask, int n);
    void        get_stats(int il, pyorch_stats & stats);
    void        get_snapshot(pyorch_snapshot & snapshot); // see pyorch_get_snapshot
    void        reset_stats();
    void        wait_idle();
    std::string last_error();

    // Index into the layers with experts.
    int layer_index(int il) const;

    const ModelMap map;

private:
    struct Layer {
        std::unique_ptr<Expert[]> experts;
        int                       n_expert;
        int                       n_resident = 0;
        int                       n_pinned   = 0;
        int                       size_class;             // of an expert that kernels can compute with
        uint64_t                  slot_bytes;             // of it
        uint64_t                  read_bytes;             // that are read for it, on average
        std::vector<int>          passes;                 // roles, in the order in which the kernels go through them
        const void *              forecast_for = nullptr; // the context whose forecast it is
        std::vector<int>          guessed      = {};      // experts with a guess whose pass is to come
        std::vector<int>          displaced    = {};      // experts with the flag
        std::vector<uint8_t>      is_resident;            // by expert
        pyorch_stats              stats = {};
    };

    // Where a context is. Others are elsewhere.
    struct Passage {
        int at   = -1; // the layer that it last acquired
        int last = -1; // that it ever acquired: those that a decode does not pass come behind it
    };

    // Bytes of full experts that a layer of a decode computes with at once, and what is reserved in the others: the
    // most lately. Where they do not fit, a layer is streamed, and what pools have of its experts is of no use to it.
    struct Width {
        uint64_t most  = 0;
        uint64_t next  = 0; // the most since `begin`
        uint64_t begin = 0; // in layers computed
    };

    std::unordered_map<int, int> layer_by_il;

    // What visits teach takes arithmetic, which is done under a mutex of its own, taken before the other: by a compute
    // thread that would sleep for a read, and at the latest by the layer that comes next.
    std::mutex               learning;
    std::unique_ptr<Learner> learner; // guarded by it; null where the policy learns nothing
    bool                     learns;  // guarded by the mutex of the table, as are
    std::deque<Visit>        visits;  // that nothing was learned from yet; without experts: only to be published
    std::atomic<bool>        has_visits{ false };
    std::unique_ptr<Bank>    bank;

    std::mutex              mutex;
    std::condition_variable arrived; // for compute threads: a matrix
    std::condition_variable space;   // for acquire: something was released or finished
    std::condition_variable idle;
    Loader                  loads;

    std::vector<Layer>                        layers;
    Values                                    values;
    EvictionOrder                             order;
    Pools                                     pools;
    PoolShares                                shares = ALL_FULL;
    Width                                     width;    // of what comes: the pool of full experts has room for it
    std::vector<int>                          pressure; // by size class: see choose_victim
    std::deque<Expert *>                      ordered;  // by name, to be read ahead; memory is not allocated yet
    std::deque<Expert *>                      prompt;   // the same, for the prompt that is being read
    Guesses                                   guesses;
    std::deque<Expert *>                      deferred;      // see defer()
    std::vector<std::unique_ptr<Stream>>      streams;       // closed ones too, while a reader is at work for them
    std::unordered_map<const void *, Passage> passages;      // by context
    uint64_t                                  n_arrived = 0; // layers that came to acquire(), served in that order
    uint64_t                                  n_served  = 0;
    uint64_t    reserved_bytes = 0; // of what eviction may not take: pinned experts and layers' minima
    int         n_in_use       = 0; // experts that are held, and windows
    Rate        regret;             // of evictions: the expert was asked for when its layer next came
    double      read_share = 0.5;   // of a guess when its pass comes, fading mean
    ReadSeconds reads      = {};    // see read_seconds()
    std::string error;

    int          n_waiting  = 0; // compute threads asleep in address()
    uint64_t     wait_begin = 0;
    int          wait_layer = 0;  // of the first of them
    pyorch_stats totals     = {}; // what is not counted by layer

    char *   zeros      = nullptr;
    uint64_t zeros_size = 0;

    Layer &         layer_of(const Expert & e) { return layers[e.layer()]; }
    static uint64_t clock_ns();
    Expert &        expert_of(const Load & load) { return layers[load.layer].experts[load.expert]; }
    Expert &        expert_at(int layer, int32_t id);

    template <typename Change>
    void for_each(int il, const int32_t * experts, int n, Change change);

    // Loader::Orders
    bool   order_ahead() override;
    bool   order_guess() override;
    Staged stage(Load & load) override;
    void   published(Load & load, int role, const char * address) override;
    void   failed(Load & load, const std::string & sentence) override;
    void   finished(Load & load) override;
    void   decodable() override;

    void expert_finished(Expert & e);

    void hold(Expert & e);
    void unhold(Expert & e);
    bool try_acquire(Owner & owner, int layer, const Demand & demand, bool & counted);
    void release_held(Owner & owner, bool & failed);
    void count_uses(int layer, const Demand & demand, const std::vector<int> & streamed);
    void count_regret(Layer & l, const Demand & demand);
    void count_seconds(const Layer & l, const Expert & e);

    pyorch_stats stats_of(int only);

    LearnerSizes   learner_sizes() const;
    LearnedValue & learned_value();
    void           make_learner_of();
    uint64_t       scarce_bytes();
    void           note_visit(const Owner & owner, int layer, const Demand & demand);
    void           learn();
    void           publish(int layer);
    void           publish_all();
    void           forget_visits(const void * context);

    template <typename Condition>
    void wait_for_arrival(std::unique_lock<std::mutex> & lock, int layer, Condition there);

    int          window(int layer) const;
    int          capacity(int layer) const;
    int          capacity_beside_window(int layer) const;
    void         open_stream(Owner & owner, int layer, const std::vector<int> & experts);
    void         fill(Stream & s);
    const char * pass_by(Stream & s, int expert, int role, bool wait, const void * thread, int n_threads);
    void         passed_by(Load & load);
    void         give_frames(Stream & s);
    void         close_stream(Owner & owner);

    bool        start_load(Expert & e, ReadFor read_for);
    void        drop(Expert & e);
    void        evict(Expert & e);
    static bool passes(const Expert & e);
    void        give_parts(Load & load, uint32_t parts);
    void        unstage(Load & load);
    void        keep_parts(Expert & e, Form form);
    void        settle_parts(Expert & e);
    uint64_t    stored_room() const;
    Expert *    least_stored();
    Expert *    least_stored(Form form);
    void        trim_pools();
    void        widen(int layer, const Demand & demand);
    void        divide_budget(uint64_t bytes);
    void        changed(const Expert & e) { order.changed(e.layer(), e.id()); }
    void        used(Expert & e);
    void        compute_keys(Victims & victims, const Expert & e);
    void        compute_changed_keys();
    bool        make_room(
        int layer, int n, Purpose purpose, float more_likely_than, const Victim & below = { -1, -1, INT_MAX, 0 });
    Victim choose_victim(int layer, Purpose purpose, float more_likely_than);
    bool   drop_queued();
    void   shrink_layer(int layer, int n);
    void   keep_budget();

    bool next_ahead(std::deque<Expert *> & wanted, bool scan);
    bool next_guess();
    bool next_deferred();
    bool has_passed(const void * context, int layer, int from);
    void settle(const void * context, int layer);
    void settle_guessed(Layer & l, const void * context);
    void end_unwanted(Expert & e);
    void end_forecast(int layer);
    void want_layer_ahead(int layer);
    bool is_idle() const;

    // Asleep for memory: what goes for it must not be taken for anything else before it wakes.
    bool layer_waits() const { return n_served != n_arrived; }

    void             reserve();
    std::vector<int> reserved() const;
    uint64_t         needed_budget(const std::vector<int> & reserved) const;
    uint64_t         most_for_full() const;
};

// Sleeps until something is there that the compute threads need, and decodes while there is something to decode.
template <typename Condition>
void Table::wait_for_arrival(std::unique_lock<std::mutex> & lock, int layer, Condition there) {
    if (n_waiting++ == 0) {
        wait_begin = clock_ns();
        wait_layer = layer;
    }
    while (!there()) {
        if (!loads.decode_next(lock)) {
            arrived.wait(lock);
        }
    }
    if (--n_waiting == 0) {
        const uint64_t waited = clock_ns() - wait_begin;
        totals.stall_ns += waited;
        layers[wait_layer].stats.stall_ns += waited;
    }
}

} // namespace pyorch
