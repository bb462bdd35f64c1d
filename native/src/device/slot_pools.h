// Which experts are in the slots of a device, which of them goes when another comes, and what a layer that comes has to
// do with those that it lacks there.
//
// It knows no bytes and no threads: who calls it guards it, and moves what it says (routing/device_tier.h, and in
// simulated time replay/simulated_device.h).
//
// Life of an expert there:
//
//     absent --admitted--> coming --arrived--> there --another is admitted--> absent
//
// One that must come, and is not worth the slot that it gets, passes through: unless it is used again before, it is the
// first to go. So what must come takes but a few slots from what is worth them.
//
// A layer that runs holds those that its kernels read; what is held, or coming, never goes. What is coming is there for
// the layer that it came for, or the next time that its layer comes, whenever its bytes arrived: so what is computed
// where follows from what was asked for alone.
//
// Some slots of each pool may be kept for what forecasts name (guests.h). Such a guest comes for the next pass
// of one context through its layer, and nobody else computes with it:
//
//     absent --ordered--> coming --arrived--> there, for that pass --it is over--> absent
//                                                 \--admitted, its slot too--> there
//
// Values, limits and who goes first are those of host memory (values.h), of uses that are counted here.

#pragma once

#include "base/counters.h"
#include "residency/eviction_order.h"
#include "residency/guesses.h"
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
    ~SlotPools();

    // Of the layer's limits: what is more than its most and not held goes.
    // REQUIRES: 0 <= min <= max, and the minima of a pool leave a slot.
    void set_limits(int layer, int min, int max);

    // What is done about experts that are not there: see pyorch_device_misses.
    void set_misses(pyorch_device_misses how) { misses = how; }

    // Keeps slots for so many experts of forecasts a layer, above 0, in pools with enough slots for that.
    // REQUIRES: nothing came yet.
    void set_ahead(int n);

    // A forecast of a layer's next pass in a context. Makes guests, the likeliest first, of experts that are absent and
    // whose like came true at least so often. These are coming then.
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
    int slot(int layer, int expert) const;

    // Whether it is there or coming, and to which slot.
    bool known(int layer, int expert) const { return coming_to(layer, expert) != NONE; }
    int  coming_to(int layer, int expert) const { return layers[layer].experts[expert].slot; }

    bool is_guest(int layer, int expert) const { return layers[layer].experts[expert].guest_of != nullptr; }
    bool passes_through(int layer, int expert) const { return layers[layer].experts[expert].passing; }

    void hold(int layer, int expert);
    void unhold(int layer, int expert);

    // Makes an absent expert one that is coming; the slot that it gets is free, or that of the least valuable expert
    // which nobody holds. NONE: there is none, or, unless it must be, none that is worth less. took: from another one.
    int  admit(int layer, int expert, bool must, bool & took);
    void arrived(int layer, int expert, bool uploaded = true);

    // All experts of a layer are there, each in the slot of its number. REQUIRES: none of its pool's slots was taken, and
    // there is one for each.
    void take_whole(int layer);

    // Free slots for experts of a layer, the first ones, up to its even share of the pool's slots. These are coming
    // then.
    std::vector<int> fill(int layer, const std::vector<int> & experts);
    void             abandon(int layer, int expert); // it did not come

    // Calls tell(layer, known[n_expert]) for each layer of which other experts than the last time are there or coming,
    // but for those that pass through.
    template <typename Tell>
    void tell_moved(Tell tell) {
        for (int layer : moved) {
            std::vector<uint8_t> known_ones;
            for (const Seated & e : layers[layer].experts) {
                known_ones.push_back(e.slot != NONE && !e.guest_of && !e.passing);
            }
            layers[layer].moved = false;
            tell(layer, known_ones);
        }
        moved.clear();
    }

    // mask[n_expert]: becomes 1 for each expert of the layer that is there, and no guest.
    void mark(int layer, std::vector<uint8_t> & mask) const;
    int  n_there(int layer) const { return layers[layer].n_there; }

    // Slots of its pool that are kept for guests.
    int n_kept(int layer) const { return pools[layers[layer].pool].n_kept; }

    // What was counted of a layer: device_hits and so on, but for bytes and times.
    pyorch_stats & counts(int layer) { return layers[layer].counts; }
    void           reset_counts();

private:
    struct Ahead;

    struct Seated {
        int          slot     = NONE;
        int          holds    = 0;
        bool         coming   = false;
        bool         passing  = false;
        const void * guest_of = nullptr; // for this context's next pass
    };
    struct Layer {
        int                 pool;
        std::vector<Seated> experts;
        int                 n_there = 0;
        bool                moved   = false;
        pyorch_stats        counts  = {};
    };
    struct Seat {
        int layer;
        int expert;
    };
    struct Pool {
        std::vector<int>  layers;
        std::vector<int>  free; // slots, the lowest last
        int               n_slots;
        int               n_kept  = 0;  // for guests, which are in them
        std::vector<int>  kept    = {}; // of these, those in which nobody is
        std::vector<Seat> passing = {}; // the first to come first
    };

public:
    // Of the experts, whoever is there: policy, uses, limits.
    Values values;

private:
    EvictionOrder          eviction;
    std::vector<Layer>     layers;
    std::vector<Pool>      pools;
    size_t                 n_needed = 0; // experts of the layer that came last
    std::vector<int>       moved;        // layers with the flag
    pyorch_device_misses   misses = PYORCH_PROCESSOR;
    std::unique_ptr<Ahead> ahead; // null: no guests

    EvictionOrder::SetKeys keys();

    void changed(int layer, int expert) { eviction.changed(layer, expert); }
    void count_uses(int layer, const std::vector<int> & asked);
    void move(int layer, int expert, int slot);
    void mark_moved(int layer);
    void stays(int layer, int expert);
    void give(int layer, int expert);
    Seat first_passing(const Pool & pool, int layer, bool of_layer) const;
    Seat least_of(const Pool & pool, int layer, bool of_layer);
    Seat goes_first(const Pool & pool, int layer, bool of_layer);
    void shrink_layer(int layer);
    bool make_room(int layer, int expert, bool must, bool & took);

    // Of guests: guests.cpp.
    bool admit_guest(int layer, int expert, bool & took);
    void give_kept(Pool & pool, int slot);
    void judge(int layer, const DeviceDemand & demand);
};

} // namespace pyorch
