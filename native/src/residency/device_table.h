// Which experts are in the slots of a device, and which of them goes when another comes.
//
// It knows no bytes and no threads: who calls it guards it, and moves what it says (routing/device_tier.h).
//
// Life of an expert there:
//
//     absent --admit--> coming --arrived--> there --admit of another--> absent
//
// A layer that runs holds those that its kernels read; what is held, or coming, never goes.

#pragma once

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

class DeviceTable {
public:
    static constexpr int NONE = -1;

    // pool_of: by layer; n_slots: by pool. Of the policies, lru, lfu and fifo are here as they are elsewhere; for all
    // others lfu stands in.
    DeviceTable(const std::vector<int> & n_experts, const std::vector<int> & pool_of, const std::vector<int> & n_slots,
        pyorch_policy policy);

    // A layer comes, and its router asks for these, ascending.
    void pass(int layer, const std::vector<int> & asked);

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
        int                 n_there = 0;
        DeviceCounts        counts  = {};
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

    void   changed(int layer, int expert);
    double value(const Seated & expert) const;
    void   give(int layer, int expert);
};

} // namespace pyorch
