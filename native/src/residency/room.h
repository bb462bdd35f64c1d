// Room: how host memory is divided, and what goes when something else comes.
//
// The budget is for full experts and for stored parts (pools.h). Of the former, some are reserved: pinned experts, and
// the minima of layers, which eviction cannot take. Every layer can run beside what is reserved, whole or through its
// window: a budget, pins and minima under which one could not are refused.
//
// An expert goes by its value (values.h), wherever it is, but for one thing: memory of one size class is not memory of
// another until the system has taken it back, so classes keep to themselves what they can.

#pragma once

#include "loading/loader.h"
#include "residency/expert.h"
#include "residency/guesses.h"
#include "residency/stored_parts.h"

#include <climits>
#include <vector>

namespace pyorch {

class Room {
public:
    // Throws Failure: PYORCH_BUDGET below the map's floor.
    Room(const Locked & locked, Residents & residents, StoredParts & stored, Loader & loads, const PoolShares & shares);

    // Evicts until n experts of the layer fit, and only what goes before `below`. What was read ahead and not used yet
    // goes only for demand; what was used in the last pass of its layer not for a guess. False if what is left is in
    // use: the caller waits and tries again.
    bool make_room(const Locked & locked, int layer, int n, Purpose purpose, float more_likely_than = INFINITY,
        const Victim & below = { -1, -1, INT_MAX, 0 });

    // So that n more experts of the layer are not more than its most.
    void make_room_within(int layer, int n);

    // Under a budget that was lowered: what nobody holds goes at once, what running layers hold when they end.
    void keep_budget(const Locked & locked);

    // Slots of the smallest budget that the layer can be computed with, beside what is reserved.
    int window(int layer) const { return map.floor_experts(map.layers[layer]); }

    // Experts of a layer that can be in memory at once, beside what is reserved in the others.
    int capacity(int layer) const;

    // The same, beside its own window: those that eviction may not take included.
    int capacity_beside_window(int layer) const;

    // Whether these fit into memory together, beside what is reserved in other layers.
    bool fits(int layer, const std::vector<int> & experts) const {
        return n_with_pinned(layer, experts) <= capacity(layer);
    }

    // A layer comes, of several sequences perhaps: together they compute with more experts of a layer than one, for
    // which a plan is made.
    void widen(const Locked & locked, int layer, const Demand & demand);

    // The same: what had to go since it last came was missed, or not.
    void count_regret(int layer, const Demand & demand);

    // Share of evictions lately of which the expert was asked for when its layer next came.
    double regret() const { return missed.value(); }

    // These throw Failure, and change nothing then, where a layer could not run any more.
    void set_budget(const Locked & locked, uint64_t bytes);
    void check_pins(int layer, int n_pins) const; // so many more in the layer
    void set_limits(const Locked & locked, int layer, int min, int max);

    void set_shares(const Locked & locked,
        const PoolShares &         wanted); // by form, their sum is 1; only compressed experts have forms

    // What is pinned has changed.
    void reserve(const Locked & locked);

private:
    // Bytes of full experts that a layer of a decode computes with at once, and what is reserved in the others: the
    // most lately. Where they do not fit, a layer is streamed, and what pools have of its experts is of no use to it.
    struct Width {
        uint64_t most  = 0;
        uint64_t next  = 0; // the most since `begin`
        uint64_t begin = 0; // in layers computed
    };

    Residents &                   residents;
    const ModelMap &              map    = residents.map;
    Bank &                        bank   = residents.bank;
    Values &                      values = residents.values;
    EvictionOrder &               order  = residents.order;
    StoredParts &                 stored;
    Loader &                      loads;
    PoolShares                    shares;
    Width                         width;      // of what comes: the pool of full experts has room for it
    std::vector<int>              size_class; // by layer
    std::vector<int>              pressure;   // by size class: see choose_victim
    std::vector<std::vector<int>> displaced;  // by layer: experts that had to go since it last came
    uint64_t reserved_bytes = 0;              // of what eviction may not take: pinned experts and layers' minima
    Rate     missed;

    Victim           choose_victim(int layer, Purpose purpose, float more_likely_than);
    void             evict(Expert & e);
    bool             drop_queued(const Locked & locked);
    int              n_with_pinned(int layer, const std::vector<int> & experts) const;
    std::vector<int> reserved() const;
    uint64_t         needed_budget(const std::vector<int> & reserved) const;
    uint64_t         most_for_full() const;
    void             divide_budget(const Locked & locked, uint64_t bytes);
};

} // namespace pyorch
