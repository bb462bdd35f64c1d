// Which experts are in the slots of a device, which of them is evicted when another comes, and what a layer does with
// the experts that it lacks there.
//
// It knows no bytes and no threads: the caller guards it, and moves what it says (routing/device_tier.h, and in
// simulated time replay/simulated_device.h). States, holds, values and the order of eviction are those of any memory
// (residency/seats.h), of uses that are counted here.
//
// If a layer must have an expert that is worth less than all others, that expert passes through: unless it is used
// again, it is evicted first. So such experts take but a few slots from others.
//
// What is coming is there for the layer that it came for, or the next time that its layer comes, whenever its bytes
// arrived: so what is computed where follows from what was asked for alone.
//
// Some slots of each pool may be kept for what forecasts name (guests.cpp). Such a guest comes for the next pass of one
// context through its layer, and nobody else computes with it:
//
//     absent --ordered--> coming --arrived--> there, for that pass --it is over--> absent
//                                                 \--admitted, its slot too--> resident

#pragma once

#include "residency/guesses.h"
#include "residency/seats.h"
#include "residency/tier.h"

#include <memory>
#include <vector>

namespace pyorch {

// What a layer needs that comes, for one ubatch.
struct DeviceDemand {
    const std::vector<int> & experts; // that it computes with, ascending
    const std::vector<int> & asked;   // that its router chose, the same
    int                      n_tokens;
    const void *             context = nullptr; // whose layer it is
    bool                     stays   = false;   // nothing may come: there is no place to bring it from
};

class SlotPools {
public:
    static constexpr int NONE       = -1;
    static constexpr int MOST_AHEAD = 64; // experts of forecasts a layer

    // pool_of: by layer; n_slots: by pool. policies: that can be chosen. Throws Failure for another one.
    SlotPools(const std::vector<int> & n_experts, const std::vector<int> & pool_of, const std::vector<int> & n_slots,
        pyorch_policy policy, const Policies & policies = policy_list());

    // Counts of a layer: device_hits and so on, but for bytes and times.
    Seats seats;

    // Of the layer's limits: what is more than its most and not held goes.
    // REQUIRES: 0 <= min <= max, and min is 0 or less than slots_for(layer).
    void set_limits(int layer, int min, int max);

    // Slots that minima of other layers and guests leave to a layer.
    int slots_for(int layer) const;

    // What is done about experts that are not there: see pyorch_device_misses.
    void set_misses(pyorch_device_misses how) { misses = how; }

    // Keeps slots for so many experts of forecasts a layer, above 0, in pools with enough slots for that.
    // REQUIRES: nothing came yet.
    void set_ahead(int n);

    // A forecast of a layer's next pass in a context. Makes guests, the likeliest first, of experts that are absent and
    // whose like came true at least so often; precision below 0: more often than not. These are coming then.
    std::vector<int> order(
        const void * context, int layer, const std::vector<ForecastExpert> & forecast, double precision);

    // Guests of that pass.
    const std::vector<int> & ordered(const void * context, int layer) const;
    std::vector<int>         layers_ordered(const void * context) const; // layers that have some

    // Nothing is said of that pass any more. REQUIRES: its guests were abandoned.
    void forget(const void * context, int layer);

    // A layer comes: which of its experts are where. Counts hits and misses, and holds the hits.
    // REQUIRES: of the layer nothing is coming; but of its guests those that it computes with may be, and are uploads
    // then. The others were abandoned.
    DevicePass find(int layer, const DeviceDemand & demand);

    // Then, once: what comes for it, and what stays. learned: what a LearnedValue says of its experts since it knows what
    // was asked for, empty where there is none.
    void replace(int layer, const DeviceDemand & demand, DevicePass & pass, const std::vector<double> & learned = {});

    // Both.
    DevicePass pass(int layer, const DeviceDemand & demand, const std::vector<double> & learned = {}) {
        DevicePass pass = find(layer, demand);
        replace(layer, demand, pass, learned);
        return pass;
    }

    // Where an expert is; NONE: not there, or still coming, or a guest.
    int slot(int layer, int expert) const {
        const Slotted & e = layers[layer].experts[expert];
        return e.resident() ? e.slot : NONE;
    }

    // Whether it is there or coming, and to which slot.
    bool known(int layer, int expert) const { return coming_to(layer, expert) != NONE; }
    int  coming_to(int layer, int expert) const { return layers[layer].experts[expert].slot; }

    bool is_guest(int layer, int expert) const { return layers[layer].experts[expert].guess_of != nullptr; }
    bool passes_through(int layer, int expert) const { return layers[layer].experts[expert].passing; }

    void hold(int layer, int expert) { seats.hold(layers[layer].experts[expert]); }
    void unhold(int layer, int expert);

    // Makes an absent expert one that is coming; the slot that it gets is free, or that of the least valuable expert
    // which nobody holds. NONE: there is none, or, unless it must be, none that is worth less. took: from another one.
    int  admit(int layer, int expert, bool must, bool & took);
    void arrived(int layer, int expert, bool uploaded = true);
    void abandon(int layer, int expert) { give(layers[layer].experts[expert]); } // it did not come

    // All experts of a layer are there, each in the slot of its number. REQUIRES: none of its pool's slots was taken, and
    // there is one for each.
    void take_whole(int layer);

    // Free slots for experts of a layer, the first ones, up to its even share of the pool's slots. These are coming
    // then.
    std::vector<int> fill(int layer, const std::vector<int> & experts);

    // Calls tell(layer, known[n_expert]) for each layer of which other experts than the last time are there or coming,
    // but for those that pass through.
    template <typename Tell>
    void tell_moved(Tell tell) {
        for (int layer : moved) {
            std::vector<uint8_t> known_ones;
            for (const Slotted & e : layers[layer].experts) {
                known_ones.push_back(!e.absent() && !e.passing);
            }
            layers[layer].moved = false;
            tell(layer, known_ones);
        }
        moved.clear();
    }

private:
    struct Ahead;

    // A guest has a slot, but no seat: guess_of is set while its state is ABSENT.
    struct Slotted : Seat {
        int  slot    = NONE;
        bool passing = false;
        bool came    = false; // of a guest
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
        int                    n_kept  = 0;  // for guests, which are in them
        std::vector<int>       kept    = {}; // of these, those in which nobody is
        std::vector<Slotted *> passing = {}; // the first to come first
    };

    Values &               values = seats.values;
    std::vector<Layer>     layers;
    std::vector<Pool>      pools;
    size_t                 n_needed = 0; // experts of the layer that came last
    std::vector<int>       moved;        // layers with the flag
    pyorch_device_misses   misses = PYORCH_PROCESSOR;
    std::shared_ptr<Ahead> ahead; // null: no guests

    Pool &       pool_of(const Seat & e) { return pools[layers[e.layer].pool]; }
    const Pool & pool_of(int layer) const { return pools[layers[layer].pool]; }
    void         count_uses(int layer, const std::vector<int> & asked);
    void         mark_moved(int layer);
    void         stays(Slotted & e);
    void         give(Slotted & e);
    Slotted *    first_passing(const Pool & pool, int layer, bool of_layer) const;
    Slotted *    least_of(const Pool & pool, int layer, bool of_layer);
    void         shrink_layer(int layer);
    bool         make_room(Slotted & e, bool must, bool & took);

    // Of guests: guests.cpp.
    bool admit_guest(Slotted & e, bool & took);
    void give_kept(Pool & pool, int slot);
    void judge(int layer, const DeviceDemand & demand);
};

} // namespace pyorch
