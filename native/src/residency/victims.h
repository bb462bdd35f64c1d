// The least valuable expert of each layer, known without looking at all of them each time.
//
// For every expert the index has a key for each purpose that memory is wanted for; the lowest goes first. A layer whose
// keys changed is looked through again when its least is next asked for, and only then: finding a victim costs a
// comparison for each layer, and a pass over the keys of those few layers that were touched since.

#pragma once

#include <cmath>
#include <limits>
#include <vector>

namespace pyorch {

enum Purpose {
    FOR_DEMAND, // a running layer needs it
    FOR_ORDER,  // it is read ahead for certain: by name, or for a prompt
    FOR_GUESS,  // it is read ahead on a guess
};

inline constexpr int N_PURPOSES = 3;

class Victims {
public:
    // Beside the values of a policy, a key is one of these. An expert that only wide batches used goes before all
    // others; one that is there on a guess is for a layer that has not come yet, and goes last.
    static constexpr double SCANNED = -std::numeric_limits<double>::infinity();
    static constexpr double GUESSED = std::numeric_limits<double>::max();
    static constexpr double NEVER   = std::numeric_limits<double>::infinity();

    struct Least {
        int    expert; // -1: none may go
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

    // Of the experts that a condition (expert) -> bool allows: looks at all of the layer.
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

} // namespace pyorch
