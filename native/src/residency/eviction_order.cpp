#include "residency/eviction_order.h"

#include <algorithm>

namespace pyorch {

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

// Layers are passed in a cycle: the one that was passed last is needed last, but for those never passed.
double EvictionOrder::turn_of_scanned(int layer, int for_layer) const {
    const int n     = values.n_executed();
    const int ahead = !values.is_executed(layer) ? n :
        for_layer < 0                            ? values.position(layer) :
                                                   (values.layers_between(for_layer, layer) + n - 1) % n;
    return -(double) ahead;
}

} // namespace pyorch
