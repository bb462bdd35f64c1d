// Which expert goes first of those that are in one memory, by the values that they have now (values.h).
//
// What is learnt of an expert, or done with it, may change when it goes. When that is, is computed when somebody asks:
// an expert that is held, used and given back has changed once. Who fills the memory knows who is there and who may go,
// and says so with a key for each purpose that memory is wanted for (victims.h).

#pragma once

#include "residency/values.h"
#include "residency/victims.h"

#include <cmath>
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
    explicit EvictionOrder(Values & values); // that outlives it
    ~EvictionOrder();

    EvictionOrder(const EvictionOrder &)             = delete;
    EvictionOrder & operator=(const EvictionOrder &) = delete;

    // An expert came, or begins to; it went.
    void came(int layer) { ++layers[layer].n; }

    void went(int layer) { --layers[layer].n; }

    int n(int layer) const { return layers[layer].n; } // that came and did not go

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

    // Calls set_keys(victims, layer, expert) for each expert that changed. REQUIRED before first() sees the changes.
    template <typename SetKeys>
    void update(SetKeys set_keys) {
        for (int layer : changed_layers) {
            layers[layer].all_changed = false;
            for (int expert = 0; expert < values.n_experts(layer); ++expert) {
                set_keys(victims, layer, expert);
            }
        }
        for (const auto & [layer, expert] : changed_experts) {
            layers[layer].changed[expert] = 0;
            set_keys(victims, layer, expert);
        }
        changed_layers.clear();
        changed_experts.clear();
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
    Victims                          victims;
    std::vector<Layer>               layers;
    std::vector<std::pair<int, int>> changed_experts; // with the flag
    std::vector<int>                 changed_layers;
};

} // namespace pyorch
