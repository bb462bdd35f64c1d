// The experts in host memory: why each has memory, and which layers hold it.
//
// Only Residents changes the state of an expert (seats.h), and allocates and frees its memory. Kernels read two fields
// of an expert without the table's mutex.
//
// The states describe the matrices that kernels compute with. Stored parts of a compressed expert may be in memory too
// (stored_parts.h). A load brings all of them; at its end, the parts of the expert's pool stay.
//
// A held or pinned expert is never dropped. A load without a purpose is abandoned: it ends with its current
// request, unless a layer wants the expert again before.

#pragma once

#include "banks/bank.h"
#include "residency/expert.h"

#include <memory>
#include <vector>

namespace pyorch {

class Residents {
public:
    struct Layer {
        std::unique_ptr<Expert[]> experts;
        int                       n_expert;
        int                       n_above      = 0;
        int                       n_only_above = 0; // on a tier above, and not resident here
        int                       n_pinned     = 0;
        int                       size_class; // of a full expert
        uint64_t                  slot_bytes; // of it
        uint64_t                  read_bytes; // that one load reads, on average
        std::vector<int>          guessed;    // experts with a guess for a coming pass
    };

    // set_keys: see set_keys() below. policies: the policies that may be chosen. Throws Failure for another one.
    Residents(const ModelMap & map, Bank & bank, const Policies & policies, pyorch_policy policy,
        EvictionOrder::SetKeys set_keys);

    const ModelMap & map;
    Bank &           bank;
    Seats            seats;
    Values &         values = seats.values;
    EvictionOrder &  order  = seats.order;

    int n_layers() const { return (int) layers.size(); }

    Layer &        operator[](int layer) { return layers[layer]; }
    const Layer &  operator[](int layer) const { return layers[layer]; }
    Layer &        layer_of(const Expert & e) { return layers[e.layer]; }
    Expert &       expert(int layer, int id) { return layers[layer].experts[id]; }
    const Expert & expert(int layer, int id) const { return layers[layer].experts[id]; }
    Expert &       expert_of(const Load & load) { return expert(load.layer, load.expert); }

    // Throws Failure where the layer has no such expert.
    Expert & checked(int layer, int32_t id);

    // Experts that are held, and windows of streams.
    int n_in_use() const { return seats.n_held() + n_windows; }

    void hold(Expert & e) {
        e.abandoned = false;
        seats.hold(e);
    }

    void hold_window() { ++n_windows; }
    void unhold_window() { --n_windows; }

    void pin(Expert & e);
    void unpin(Expert & e);

    void set_above(Expert & e, bool is);

    // Allocates the memory of an absent expert, for read_for. False: no memory is free.
    bool start_load(Expert & e, ReadFor read_for);

    // All its matrices are read.
    void arrived(Expert & e);

    // REQUIRES: no reader works on it, and none of its requests is queued.
    void drop(Expert & e);

    // Counts as a use now.
    void used(Expert & e) {
        e.not_scanned();
        values.used(e.layer, e.id);
    }

    // Marks an expert as read on a guess for the next pass of a context through its layer.
    void guess_for(Expert & e, const void * context);

    // Frees slots of stored parts; their bytes are lost.
    void give_parts(Load & load, uint32_t parts);

    // Ends a load, or gives it up: parts that are not whole are freed.
    void unstage(Load & load);

    // Whether an expert is evicted before all others, whatever its value. An expert that is in a pool too can be
    // computed with now, and is cheap to get again. A layer does not ask this tier for an expert of a tier above.
    static bool passes(const Expert & e) {
        return e.scanned() || e.above || (e.kept != Form::ABSENT && !e.read_ahead());
    }

    // Gives the order of eviction its keys.
    void set_keys(Victims & victims, int layer, int id) const;

private:
    std::vector<Layer> layers;
    int                n_windows = 0;
};

} // namespace pyorch
