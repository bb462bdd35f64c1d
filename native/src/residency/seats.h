// The experts of one memory, the layers that hold them, and the order of eviction.
//
// Host memory (Residents) and each device (SlotPools) have one Seats. Its owner decides when an expert comes, and where
// its bytes lie. It calls:
//
//     absent --come()--> loading --arrive()--> resident --go()--> absent
//
// A layer holds the experts that it computes with; a held expert is not evicted. The caller guards a Seats.

#pragma once

#include "base/counters.h"
#include "residency/eviction_order.h"

#include <vector>

namespace pyorch {

// One expert in one memory. The owner's record of an expert derives from Seat.
struct Seat {
    enum State : uint8_t { ABSENT, LOADING, RESIDENT };

    int          layer    = 0;
    int          id       = 0;
    State        state    = ABSENT;
    bool         pinned   = false;
    int          holds    = 0;       // by running layers
    const void * guess_of = nullptr; // a guess for the next pass of this context through its layer

    bool absent() const { return state == ABSENT; }
    bool loading() const { return state == LOADING; }
    bool resident() const { return state == RESIDENT; }
    bool may_go() const { return resident() && holds == 0 && !pinned; }
};

class Seats {
public:
    // set_keys: gives the order of eviction its keys; an expert that may not go has the key NEVER. Others: see Values.
    Seats(const std::vector<int> & n_experts, bool may_refuse, const Policies & policies, pyorch_policy policy,
        EvictionOrder::SetKeys set_keys) :
            values(n_experts, may_refuse, policies, policy), order(values, std::move(set_keys)) {
        for (int n : n_experts) {
            layers.emplace_back().mask.resize(n);
        }
    }

    Values        values;
    EvictionOrder order;

    int n_resident(int layer) const { return layers[layer].n_resident; }
    int n_held() const { return held; } // of all layers

    // [n_expert]: 1 for each resident expert of the layer.
    const std::vector<uint8_t> & mask(int layer) const { return layers[layer].mask; }

    // As Tier::mark().
    void mark(int layer, std::vector<uint8_t> & mask) const {
        for (size_t id = 0; id < mask.size(); ++id) {
            mask[id] |= layers[layer].mask[id];
        }
    }

    // The owner's counts of a layer.
    pyorch_stats & counts(int layer) { return layers[layer].counts; }

    void reset_counts() {
        for (Layer & layer : layers) {
            layer.counts = {};
        }
    }

    void hold(Seat & seat) {
        if (seat.holds++ == 0) {
            ++held;
            changed(seat);
        }
    }

    // True: no layer holds it now.
    bool release(Seat & seat) {
        if (--seat.holds > 0) {
            return false;
        }
        --held;
        changed(seat);
        return true;
    }

    void come(Seat & seat) {
        seat.state = Seat::LOADING;
        values.admitted(seat.layer, seat.id);
        order.admitted(seat.layer);
    }

    void arrive(Seat & seat) {
        seat.state                       = Seat::RESIDENT;
        layers[seat.layer].mask[seat.id] = 1;
        ++layers[seat.layer].n_resident;
        changed(seat);
    }

    // From any state.
    void go(Seat & seat) {
        if (!seat.absent()) {
            order.went(seat.layer);
        }
        layers[seat.layer].n_resident -= seat.resident();
        layers[seat.layer].mask[seat.id] = 0;
        seat.state                       = Seat::ABSENT;
        changed(seat);
    }

    // The key of the expert has changed.
    void changed(const Seat & seat) { order.changed(seat.layer, seat.id); }

private:
    struct Layer {
        int                  n_resident = 0;
        std::vector<uint8_t> mask       = {};
        pyorch_stats         counts     = {};
    };

    std::vector<Layer> layers;
    int                held = 0;
};

} // namespace pyorch
