// Room: divides host memory, and chooses the victims.
//
// The budget holds full experts and stored parts (pools.h). Eviction cannot take the reserved memory: pinned experts,
// and the minima of layers. Every layer must be able to run in the rest, whole or through its window. So the table
// refuses a budget, pins or minima under which a layer could not run.
//
// The victim is the expert of the least value (values.h) in any layer, with one exception. The memory of one size class
// is free for another class only after the operating system has taken it back. So classes keep their memory if they
// can.

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

    // Evicts until n experts of the layer fit, but only experts with a key less than `below`. An unused read-ahead
    // expert goes only for demand. An expert of the last pass of its layer does not go for a guess. False if all others
    // are in use: the caller waits and tries again.
    bool make_room(const Locked & locked, int layer, int n, Purpose purpose, float more_likely_than = INFINITY,
        const Victim & below = { -1, -1, INT_MAX, 0 });

    // Evicts until n more experts of the layer stay below its maximum.
    void make_room_within(int layer, int n);

    // After a lower budget: evicts at once the experts that no layer holds, and the experts of running layers when they
    // end.
    void keep_budget(const Locked & locked);

    // Slots of the smallest budget under which the layer runs, without the reserved memory.
    int window(int layer) const { return map.floor_experts(map.layers[layer]); }

    // Experts of a layer that fit into memory at once, without the reserved memory of other layers.
    int capacity(int layer) const;

    // The same without its own window, with the experts that eviction may not take.
    int capacity_beside_window(int layer) const;

    // Whether these experts fit into memory together, without the reserved memory of other layers.
    bool fits(int layer, const std::vector<int> & experts) const {
        return n_with_pinned(layer, experts) <= capacity(layer);
    }

    // A layer comes. A batch of several sequences computes with more experts of a layer than one sequence; the plan
    // allows for them.
    void widen(const Locked & locked, int layer, const Demand & demand);

    // A layer comes: counts which of its recent victims it misses.
    void count_regret(int layer, const Demand & demand);

    // Share of recent victims that were missed when their layer came next.
    double regret() const { return missed.value(); }

    // These throw Failure, and change nothing, if a layer could not run any more.
    void set_budget(const Locked & locked, uint64_t bytes);
    void check_pins(int layer, int n_pins) const; // n_pins more in the layer
    void set_limits(const Locked & locked, int layer, int min, int max);

    void set_shares(const Locked & locked,
        const PoolShares &         wanted); // by form, sum 1; only compressed experts have forms

    // After pins have changed.
    void reserve(const Locked & locked);

private:
    // The most bytes lately of the full experts that a layer of a decode computes with, and of the reserved memory of
    // the other layers. If they do not fit, the layer is streamed, and pools with its experts are of no use to it.
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
    Width                         width;              // the pool of full experts has this much room for coming layers
    std::vector<int>              size_class;         // by layer
    std::vector<int>              pressure;           // by size class: see choose_victim
    std::vector<std::vector<int>> displaced;          // by layer: victims since it last came
    uint64_t                      reserved_bytes = 0; // pinned experts and layers' minima
    Rate                          missed;

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
