#include "residency/eviction_order.h"

#include <algorithm>

namespace pyorch {

Victims::Victims(const std::vector<int> & n_experts) {
    for (int n : n_experts) {
        for (int purpose = 0; purpose < N_PURPOSES; ++purpose) {
            all.push_back({});
            all.back().key.assign(n, NEVER);
        }
    }
}

void Victims::look_through(Keys & keys) {
    // Four minima, which do not depend on each other.
    const double * key  = keys.key.data();
    const int      n    = (int) keys.key.size();
    double         m[4] = { NEVER, NEVER, NEVER, NEVER };
    int            i    = 0;
    for (; i + 4 <= n; i += 4) {
        for (int j = 0; j < 4; ++j) {
            m[j] = key[i + j] < m[j] ? key[i + j] : m[j];
        }
    }
    for (; i < n; ++i) {
        m[0] = key[i] < m[0] ? key[i] : m[0];
    }
    const double lowest = std::min(std::min(m[0], m[1]), std::min(m[2], m[3]));
    keys.least          = { lowest < NEVER ? (int) (std::find(key, key + n, lowest) - key) : -1, lowest };
    keys.dirty          = false;
}

static std::vector<int> n_experts(const Values & values) {
    std::vector<int> n;
    for (int layer = 0; layer < values.n_layers(); ++layer) {
        n.push_back(values.n_experts(layer));
    }
    return n;
}

EvictionOrder::EvictionOrder(Values & values, SetKeys set_keys) :
        values(values), set_keys(std::move(set_keys)), victims(n_experts(values)), changes(n_experts(values)),
        counts(values.n_layers()) {
    values.listeners.push_back(&changes);
}

EvictionOrder::~EvictionOrder() {
    values.listeners.erase(std::find(values.listeners.begin(), values.listeners.end(), &changes));
}

Victim EvictionOrder::first_of(const std::vector<int> & layers, int for_layer, Purpose purpose) {
    Victim least;
    update();
    for (int layer : layers) {
        const Victim victim = first(layer, for_layer, purpose);
        if (victim && (!least || victim < least)) {
            least = victim;
        }
    }
    return least;
}

// A token passes the layers in a cycle: the layer that it passed last is needed last, except layers that it never
// passes.
double EvictionOrder::turn_of_scanned(int layer, int for_layer) const {
    const int n     = values.n_executed();
    const int ahead = !values.is_executed(layer) ? n :
        for_layer < 0                            ? values.position(layer) :
                                                   (values.layers_between(for_layer, layer) + n - 1) % n;
    return -(double) ahead;
}

} // namespace pyorch
