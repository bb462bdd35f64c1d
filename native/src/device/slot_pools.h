// SlotPools: the experts in the slots of a device, the victims, and what a layer does with absent experts.
//
// It knows no bytes and no threads. The caller guards it, and moves the bytes (routing/device_tier.h; in simulated time
// replay/simulated_device.h). States, holds, values and the order of eviction are the same as in host memory
// (residency/seats.h), with the uses that are counted here.
//
// If a layer must have an expert that is worth less than all others, that expert is transient: unless it is used
// again, it is evicted first. So such experts take few slots from others.
//
// An expert that is coming counts as resident for the layer that it comes for, or at the next pass of its layer,
// whenever its bytes arrive. So the place of each computation depends on the requests only.
//
// Some slots of each pool may be kept for forecast experts (ordered.cpp). Such an ordered expert comes for the next
// pass of one context through its layer, and only that pass computes with it:
//
//     absent --ordered--> coming --arrived--> used by that pass --pass over--> absent
//                                                 \--admitted, its slot too--> resident

#pragma once

#include "residency/guesses.h"
#include "residency/seats.h"
#include "residency/tier.h"

#include <memory>
#include <vector>

namespace pyorch {

// The needs of a layer that comes, for one ubatch.
struct DeviceDemand {
    const std::vector<int> & experts; // it computes with these, ascending
    const std::vector<int> & asked;   // the router's choice, ascending
    int                      n_tokens;
    const void *             context = nullptr; // of the layer
    bool                     stays   = false;   // nothing may come: it has no source
};

class SlotPools {
public:
    static constexpr int NONE       = -1;
    static constexpr int MOST_AHEAD = 64; // forecast experts a layer

    // pool_of: by layer; n_slots: by pool. policies: the policies that may be chosen. Throws Failure for another one.
    SlotPools(const std::vector<int> & n_experts, const std::vector<int> & pool_of, const std::vector<int> & n_slots,
        pyorch_policy policy, const Policies & policies = policy_list());

    // Counts of a layer: device_hits and so on, without bytes and times.
    Seats seats;

    // Limits of the layer: evicts experts beyond `max` that no layer holds.
    // REQUIRES: 0 <= min <= max, and min is 0 or less than slots_for(layer).
    void set_limits(int layer, int min, int max);

    // Slots of a layer, without the minima of other layers and without ordered experts.
    int slots_for(int layer) const;

    // What is done with absent experts: see pyorch_device_misses.
    void set_misses(pyorch_device_misses how) { misses = how; }

    // Keeps slots for so many forecast experts a layer, above 0, in pools with enough slots for it.
    // REQUIRES: no expert has come yet.
    void set_ahead(int n);

    // A forecast of a layer's next pass in a context. Orders absent experts, the likeliest first, if experts
    // like them came true at least as often as `precision`; below 0: more often than not. They are coming then.
    std::vector<int> order(
        const void * context, int layer, const std::vector<ForecastExpert> & forecast, double precision);

    // The ordered experts of that pass.
    const std::vector<int> & ordered(const void * context, int layer) const;
    std::vector<int>         layers_ordered(const void * context) const; // layers that have some

    // Deletes the forecast of that pass. REQUIRES: its ordered experts were abandoned.
    void forget(const void * context, int layer);

    // A layer comes: finds its experts. Counts hits and misses, and holds the hits.
    // REQUIRES: no expert of the layer is coming, except ordered ones that it computes with; they become uploads. The others
    // were abandoned.
    DevicePass find(int layer, const DeviceDemand & demand);

    // Then, once: decides which experts come for it, and which stay. learned: values of a LearnedValue that knows this
    // visit; empty without one.
    void replace(int layer, const DeviceDemand & demand, DevicePass & pass, const std::vector<double> & learned = {});

    // find() and replace().
    DevicePass pass(int layer, const DeviceDemand & demand, const std::vector<double> & learned = {}) {
        DevicePass pass = find(layer, demand);
        replace(layer, demand, pass, learned);
        return pass;
    }

    // The slot of an expert; NONE: absent, or still coming, or ordered.
    int slot(int layer, int expert) const {
        const Slotted & e = layers[layer].experts[expert];
        return e.resident() ? e.slot : NONE;
    }

    // Whether it is resident or coming, and its slot.
    bool known(int layer, int expert) const { return coming_to(layer, expert) != NONE; }
    int  coming_to(int layer, int expert) const { return layers[layer].experts[expert].slot; }

    bool is_ordered(int layer, int expert) const { return layers[layer].experts[expert].guess_of != nullptr; }
    bool is_transient(int layer, int expert) const { return layers[layer].experts[expert].transient; }

    void hold(int layer, int expert) { seats.hold(layers[layer].experts[expert]); }
    void unhold(int layer, int expert);

    // Makes an absent expert a coming one, in a free slot or in the slot of the least valuable expert that no layer
    // holds. NONE: no such slot, or (unless it must) no expert is worth less. took: another expert was evicted.
    int  admit(int layer, int expert, bool must, bool & took);
    void arrived(int layer, int expert, bool uploaded = true);
    void abandon(int layer, int expert) { give(layers[layer].experts[expert]); } // it does not come

    // All experts of a layer are there, each in the slot of its number. REQUIRES: its pool has one free slot for each.
    void take_whole(int layer);

    // Gives free slots to experts of a layer, the first ones, up to its even share of the pool. They are coming then.
    std::vector<int> fill(int layer, const std::vector<int> & experts);

    // Calls tell(layer, known[n_expert]) for each layer if its resident or coming experts have changed since the last
    // call, apart from transient ones.
    template <typename Tell>
    void tell_moved(Tell tell) {
        for (int layer : moved) {
            std::vector<uint8_t> known_ones;
            for (const Slotted & e : layers[layer].experts) {
                known_ones.push_back(!e.absent() && !e.transient);
            }
            layers[layer].moved = false;
            tell(layer, known_ones);
        }
        moved.clear();
    }

private:
    struct Ahead;

    // An ordered expert has a slot, but no seat: its state is ABSENT, and guess_of is set.
    struct Slotted : Seat {
        int  slot      = NONE;
        bool transient = false;
        bool arrived   = false; // of an ordered expert
    };
    struct Layer {
        int                  pool;
        std::vector<Slotted> experts;
        bool                 moved = false;
    };
    struct Pool {
        std::vector<int>       layers;
        std::vector<int>       free; // slots, the lowest last
        int                    n_slots;
        int                    n_kept     = 0;  // kept for ordered experts
        std::vector<int>       kept       = {}; // the free ones of n_kept
        std::vector<Slotted *> transients = {}; // in the order in which they came
    };

    Values &               values = seats.values;
    std::vector<Layer>     layers;
    std::vector<Pool>      pools;
    size_t                 n_needed = 0; // experts of the last layer
    std::vector<int>       moved;        // layers with the flag
    pyorch_device_misses   misses = PYORCH_PROCESSOR;
    std::shared_ptr<Ahead> ahead; // null: nothing is ordered

    Pool &       pool_of(const Seat & e) { return pools[layers[e.layer].pool]; }
    const Pool & pool_of(int layer) const { return pools[layers[layer].pool]; }
    void         count_uses(int layer, const std::vector<int> & asked);
    void         mark_moved(int layer);
    void         stays(Slotted & e);
    void         give(Slotted & e);
    Slotted *    first_transient(const Pool & pool, int layer, bool of_layer) const;
    Slotted *    least_of(const Pool & pool, int layer, bool of_layer);
    void         shrink_layer(int layer);
    bool         make_room(Slotted & e, bool must, bool & took);

    // In ordered.cpp.
    bool admit_ordered(Slotted & e, bool & took);
    void give_kept(Pool & pool, int slot);
    void judge(int layer, const DeviceDemand & demand);
};

} // namespace pyorch
