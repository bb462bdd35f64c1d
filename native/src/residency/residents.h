// Who is in host memory, why, and who holds it.
//
// Only Residents moves an expert from one state to another (seats.h), and takes and gives its memory. Kernels read two
// fields of an expert without the mutex of the table.
//
// States are about the matrices that kernels compute with. Beside them, stored parts of a compressed expert may be in
// memory (stored_parts.h): a load has them all, and when it ends, those that the expert's pool wants stay.
//
// What is held or pinned is never dropped. A load that ends with the request under way, because nobody wants it any
// more, is abandoned, until somebody does want it, or it is dropped.

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
        int                       n_only_above = 0; // not resident, too
        int                       n_pinned     = 0;
        int                       size_class; // of an expert that kernels can compute with
        uint64_t                  slot_bytes; // of it
        uint64_t                  read_bytes; // that are read for it, on average
        std::vector<int>          guessed;    // experts with a guess whose pass is to come
    };

    // set_keys: see set_keys() below. policies: that can be chosen. Throws Failure for another one.
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

    // Gives an absent expert its memory, for read_for. False: there is none.
    bool start_load(Expert & e, ReadFor read_for);

    // All its matrices are there.
    void arrived(Expert & e);

    // REQUIRES: no reader works on it, and none of its requests is queued
    void drop(Expert & e);

    // It counts as used now.
    void used(Expert & e) {
        e.not_scanned();
        values.used(e.layer, e.id);
    }

    // Notes that an expert is read on a guess for the next pass of a context through its layer.
    void guess_for(Expert & e, const void * context);

    // Slots of stored parts go back; what lay there is not there any more.
    void give_parts(Load & load, uint32_t parts);

    // A load is over, or is given up: what it did not bring in whole goes.
    void unstage(Load & load);

    // Whether an expert goes before all others, whatever its value. What a pool has too is there to be computed with
    // now; to get it again costs little. What a tier above has is not asked for here.
    static bool passes(const Expert & e) {
        return e.scanned() || e.above || (e.kept != Form::ABSENT && !e.read_ahead());
    }

    // Says when an expert may go, for the order of eviction.
    void set_keys(Victims & victims, int layer, int id) const;

private:
    std::vector<Layer> layers;
    int                n_windows = 0;
};

} // namespace pyorch
