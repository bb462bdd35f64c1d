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
// A layer that runs holds those that its kernels read; what is held, or coming, never goes. What is coming is there for
// the layer that it came for, or the next time that its layer comes, whenever its bytes arrived: so what is computed
// where follows from what was asked for alone.
//
// Values are those of the policies of host memory (eviction.h), of uses that are counted here.

#pragma once

#include "banks/device_rates.h"
#include "residency/eviction.h"
#include "residency/victims.h"

#include <memory>
#include <vector>

namespace pyorch {

// What was counted for a layer.
struct DeviceCounts {
    uint64_t hits      = 0; // uses of experts that were there
    uint64_t misses    = 0; // of all others
    uint64_t computed  = 0; // of those that were computed there
    uint64_t loads     = 0; // experts that came
    uint64_t evictions = 0;
};

// What a layer needs that comes, for one ubatch.
struct DeviceDemand {
    const std::vector<int> & experts; // that it computes with, ascending
    const std::vector<int> & asked;   // that its router chose, the same
    const std::vector<int> & rows;    // by expert: tokens that use it
    int                      n_tokens;
};

// What becomes of its experts.
struct DevicePass {
    std::vector<int> slots   = {}; // by expert: where it is there and held now, else NONE
    std::vector<int> uploads = {}; // come before the layer is computed, and are computed there
    std::vector<int> behind  = {}; // come while it is computed
};

class DeviceTable {
public:
    static constexpr int NONE = -1;

    // pool_of: by layer; n_slots: by pool.
    DeviceTable(const std::vector<int> & n_experts, const std::vector<int> & pool_of, const std::vector<int> & n_slots,
        pyorch_policy policy);

    // From now on. What a Learner says has to be told anew.
    void set_policy(pyorch_policy policy);

    // What a Learner says: values[n_expert].
    void set_learned(int layer, const std::vector<double> & values);

    // In a replay: when an expert will be used next (see Usage).
    void foresee(int layer, int expert, uint64_t next_use);

    // Of a layer's experts at least `min` stay while there are so many, and no more than `max` come; what is more and
    // not held goes.
    // REQUIRES: 0 <= min <= max, and the minima of a pool leave a slot.
    void set_limits(int layer, int min, int max);

    // What is done about experts that are not there: see pyorch_device_misses. expert_bytes: by layer.
    void set_misses(pyorch_device_misses misses, const DeviceRates & rates, std::vector<uint64_t> expert_bytes);

    // A layer comes. learned: what a Learner says of its experts since it knows what was asked for, null where there is
    // none. Counts hits and misses, and holds the hits.
    // REQUIRES: of the layer nothing is coming.
    DevicePass pass(int layer, const DeviceDemand & demand, const std::vector<double> * learned = nullptr);

    // Where an expert is; NONE: not there, or still coming.
    int slot(int layer, int expert) const;

    // Whether it is there or coming, and to which slot.
    bool known(int layer, int expert) const { return coming_to(layer, expert) != NONE; }
    int  coming_to(int layer, int expert) const { return layers[layer].experts[expert].slot; }

    void hold(int layer, int expert);
    void unhold(int layer, int expert);

    // Makes an absent expert one that is coming; the slot that it gets is free, or that of the least valuable expert
    // which nobody holds. NONE: there is none, or, unless it must be, none that is worth less. took: from another one.
    int  admit(int layer, int expert, bool must, bool & took);
    void arrived(int layer, int expert);
    void abandon(int layer, int expert); // it did not come

    // Calls tell(layer, known[n_expert]) for each layer of which other experts than the last time are there or coming.
    template <typename Tell>
    void tell_moved(Tell tell) {
        for (int layer : moved) {
            std::vector<uint8_t> known_ones;
            for (const Seated & e : layers[layer].experts) {
                known_ones.push_back(e.slot != NONE);
            }
            layers[layer].moved = false;
            tell(layer, known_ones);
        }
        moved.clear();
    }

    // mask[n_expert]: becomes 1 for each expert of the layer that is there.
    void mark(int layer, std::vector<uint8_t> & mask) const;
    int  n_there(int layer) const { return layers[layer].n_there; }

    DeviceCounts & counts(int layer) { return layers[layer].counts; }
    void reset_counts();

private:
    struct Seated {
        Usage usage;
        int   slot   = NONE;
        int   holds  = 0;
        bool  coming = false;
    };
    struct Layer {
        int                 pool;
        std::vector<Seated> experts;
        int                 min       = 0;
        int                 max;
        int                 n_seated  = 0; // there or coming
        int                 n_there   = 0;
        uint64_t            last_pass = 0;
        std::vector<int>    fresh     = {}; // experts that were used then
        bool                moved     = false;
        DeviceCounts        counts    = {};
    };
    struct Pool {
        std::vector<int> layers;
        std::vector<int> free; // slots, the lowest last
    };

    std::vector<Layer>              layers;
    std::vector<Pool>               pools;
    std::unique_ptr<EvictionPolicy> policy;
    Victims                         victims;
    uint64_t                        now = 0; // layers that came
    int                             at_layer = 0; // that came last
    std::vector<int>                moved; // layers with the flag
    pyorch_device_misses            misses = PYORCH_PROCESSOR;
    DeviceRates                     rates;
    std::vector<uint64_t>           expert_bytes; // by layer

    int    n_that_pay(int layer, const DeviceDemand & demand, const DevicePass & pass, std::vector<int> & candidates);
    void   move(int layer, int expert, int slot);
    void   count_uses(int layer, const std::vector<int> & asked);
    void   changed(int layer, int expert);
    double value(int layer, const Seated & expert) const;
    double worth(int layer, double value) const;
    void   give(int layer, int expert);
};

} // namespace pyorch
