// Which expert goes first of those that are in one memory, by the values that they have now (values.h).
//
// What is learnt of an expert, or done with it, may change when it goes. When that is, is computed when somebody asks:
// an expert that is held, used and given back has changed once. Who fills the memory knows who is there and who may go,
// and says so with a key for each purpose that memory is wanted for (victims.h).

#pragma once

#include "residency/values.h"
#include "residency/victims.h"

#include <cmath>
#include <functional>
#include <utility>
#include <vector>

namespace pyorch {

struct Victim {
    int    layer  = -1; // -1: nobody
    int    expert = -1;
    int    tier   = 0; // lower ones go first
    double value  = 0; // so do lower ones within a tier

    explicit operator bool() const { return layer >= 0; }

    bool operator<(const Victim & o) const { return tier != o.tier ? tier < o.tier : value < o.value; }
};

class EvictionOrder {
public:
    // Sets the keys of an expert.
    using SetKeys = std::function<void(Victims & victims, int layer, int expert)>;

    // values: that outlive it.
    EvictionOrder(Values & values, SetKeys set_keys);
    ~EvictionOrder();

    EvictionOrder(const EvictionOrder &)             = delete;
    EvictionOrder & operator=(const EvictionOrder &) = delete;

    // An expert of the layer came, or begins to; it went.
    void came(int layer) { ++layers[layer].n; }

    void went(int layer) { --layers[layer].n; }

    int n(int layer) const { return layers[layer].n; } // that came and did not go

    // Whether no more may come: it has its most.
    bool is_full(int layer) const { return n(layer) >= values.max(layer); }

    // When an expert goes, or whether it may, has changed.
    void changed(int layer, int expert) {
        if (!layers[layer].changed[expert]) {
            layers[layer].changed[expert] = 1;
            changed_experts.push_back({ layer, expert });
        }
    }

    void changed(int layer) { // the same of all of them
        if (!layers[layer].all_changed) {
            layers[layer].all_changed = true;
            changed_layers.push_back(layer);
        }
    }

    // Sets the keys of what changed. first() does so itself.
    void update() {
        if (!changed_layers.empty() || !changed_experts.empty()) {
            set_changed_keys();
        }
    }

    // The expert of a layer that goes first for one of for_layer (-1: for anything), and is not forecast with a higher
    // probability. Nobody, where the layer keeps its minimum.
    Victim first(int layer, int for_layer, Purpose purpose, float more_likely_than = INFINITY);

private:
    struct Layer {
        int                  n = 0;
        std::vector<uint8_t> changed; // by expert
        bool                 all_changed = false;
    };

    Values &                         values;
    const SetKeys                    set_keys;
    Victims                          victims;
    std::vector<Layer>               layers;
    std::vector<std::pair<int, int>> changed_experts; // with the flag
    std::vector<int>                 changed_layers;

    void set_changed_keys();
};

} // namespace pyorch
