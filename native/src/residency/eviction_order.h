// The order of eviction in one memory, by the values of its experts (values.h).
//
// Whatever changes a value or the state of an expert may change the order. Keys are computed on demand only:
// an expert that was held, used and released has changed once. The owner of the memory knows which experts are in it
// and may go, and says so with a key for each purpose of the memory.

#pragma once

#include "residency/values.h"

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace pyorch {

enum Purpose {
    FOR_DEMAND, // a running layer needs it
    FOR_ORDER,  // it is read ahead for a known use: by name, or for a prompt
    FOR_GUESS,  // it is read ahead on a guess
};

inline constexpr int N_PURPOSES = 3;

// The least valuable expert of each layer.
//
// The index has a key for each expert and each purpose; the lowest goes first. It searches a layer only if its keys
// have changed and its least expert is asked for. So finding a victim costs one comparison a layer, and a pass over the
// keys of the few layers that changed.
class Victims {
public:
    // Special keys. An expert that only wide batches used goes before all others. An unused guess is for a layer that
    // has not come yet, and goes last.
    static constexpr double SCANNED = -std::numeric_limits<double>::infinity();
    static constexpr double GUESSED = std::numeric_limits<double>::max();
    static constexpr double NEVER   = std::numeric_limits<double>::infinity();

    struct Least {
        int    expert; // -1: none
        double key;
    };

    explicit Victims(const std::vector<int> & n_experts);

    void set(int layer, int expert, Purpose purpose, double key) {
        Keys & keys = of(layer, purpose);
        if (keys.key[expert] != key) {
            keys.key[expert] = key;
            keys.dirty       = true;
        }
    }

    Least least(int layer, Purpose purpose) {
        Keys & keys = of(layer, purpose);
        if (keys.dirty) {
            look_through(keys);
        }
        return keys.least;
    }

    // The same for the experts that a condition (expert) -> bool allows: compares all of the layer.
    template <typename Condition>
    Least least_if(int layer, Purpose purpose, Condition allowed) {
        const Keys & keys  = of(layer, purpose);
        Least        least = { -1, NEVER };
        for (int expert = 0; expert < (int) keys.key.size(); ++expert) {
            if (keys.key[expert] < least.key && allowed(expert)) {
                least = { expert, keys.key[expert] };
            }
        }
        return least;
    }

private:
    struct Keys {
        std::vector<double> key; // by expert
        bool                dirty = false;
        Least               least = { -1, NEVER };
    };

    std::vector<Keys> all; // by layer and purpose

    Keys & of(int layer, Purpose purpose) { return all[(size_t) layer * N_PURPOSES + purpose]; }

    static void look_through(Keys & keys);
};

struct Victim {
    int    layer  = -1; // -1: no victim
    int    expert = -1;
    int    tier   = 0; // lower ones go first
    double value  = 0; // so do lower ones within a tier

    explicit operator bool() const { return layer >= 0; }

    bool operator<(const Victim & o) const { return tier != o.tier ? tier < o.tier : value < o.value; }
};

class EvictionOrder {
public:
    // Computes the keys of an expert.
    using SetKeys = std::function<void(Victims & victims, int layer, int expert)>;

    // values: must outlive the order.
    EvictionOrder(Values & values, SetKeys set_keys);
    ~EvictionOrder();

    EvictionOrder(const EvictionOrder &)             = delete;
    EvictionOrder & operator=(const EvictionOrder &) = delete;

    // An expert of the layer came (or its load began); it was evicted.
    void admitted(int layer) { ++counts[layer]; }

    void went(int layer) { --counts[layer]; }

    int n(int layer) const { return counts[layer]; } // experts that came and were not evicted

    // Whether the layer has its maximum.
    bool is_full(int layer) const { return n(layer) >= values.max(layer); }

    // The key of the expert may have changed.
    void changed(int layer, int expert) { changes.add(layer, expert); }

    // Computes the keys of the changed experts.
    void update() {
        if (changes.any()) {
            changes.take([&](int layer, int expert) { set_keys(victims, layer, expert); });
        }
    }

    // The first victim of a layer for an expert of for_layer (-1: of any layer), with a forecast of at most
    // more_likely_than. None if the layer has its minimum. It is called for every layer at each eviction.
    // REQUIRES: update() since the last change.
    Victim first(int layer, int for_layer, Purpose purpose, float more_likely_than = INFINITY) {
        // A running layer may take its own experts: once they have come it has its minimum again.
        if (counts[layer] <= values.min(layer) && !(layer == for_layer && purpose == FOR_DEMAND)) {
            return {};
        }
        const Victims::Least least = more_likely_than == INFINITY ? // any forecast
            victims.least(layer, purpose) :
            least_likely(layer, purpose, more_likely_than);
        if (least.expert < 0) {
            return {};
        }
        if (least.key == Victims::SCANNED) {
            return { layer, least.expert, 0, turn_of_scanned(layer, for_layer) };
        }
        if (least.key == Victims::GUESSED) {
            return { layer, least.expert, 2, least.key };
        }
        return { layer, least.expert, 1, values.worth_there(layer, least.key) };
    }

    // The first victim of several layers, after update().
    Victim first_of(const std::vector<int> & layers, int for_layer, Purpose purpose);

private:
    Values &         values;
    const SetKeys    set_keys;
    Victims          victims;
    Changes          changes;
    std::vector<int> counts; // by layer

    Victims::Least least_likely(int layer, Purpose purpose, float more_likely_than) {
        if (values.has_forecast(layer)) {
            const std::vector<float> & probability = values.probability(layer);
            return victims.least_if(layer, purpose, [&](int id) { return probability[id] <= more_likely_than; });
        }
        return values.even(layer) > more_likely_than ? Victims::Least{ -1, Victims::NEVER } :
                                                       victims.least(layer, purpose);
    }

    double turn_of_scanned(int layer, int for_layer) const;
};

} // namespace pyorch
