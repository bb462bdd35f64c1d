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
        values(values), set_keys(std::move(set_keys)), victims(n_experts(values)), layers(values.n_layers()) {
    for (int layer = 0; layer < values.n_layers(); ++layer) {
        layers[layer].changed.resize(values.n_experts(layer));
    }
    values.orders.push_back(this);
}

EvictionOrder::~EvictionOrder() { values.orders.erase(std::find(values.orders.begin(), values.orders.end(), this)); }

void EvictionOrder::set_changed_keys() {
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

Victim EvictionOrder::first(int layer, int for_layer, Purpose purpose, float more_likely_than) {
    update();
    // A layer that runs gives up its own for its own: its minimum is there again once they are.
    if (layers[layer].n <= values.min(layer) && !(layer == for_layer && purpose == FOR_DEMAND)) {
        return {};
    }
    const bool                 all         = more_likely_than == INFINITY; // whatever its likelihood
    const bool                 forecast    = values.has_forecast(layer);
    const std::vector<float> & probability = values.probability(layer);
    if (!all && !forecast && probability[0] > more_likely_than) {
        return {};
    }
    const Victims::Least least = all || !forecast ?
        victims.least(layer, purpose) :
        victims.least_if(layer, purpose, [&](int expert) { return probability[expert] <= more_likely_than; });
    if (least.expert < 0) {
        return {};
    }
    if (least.key == Victims::SCANNED) {
        // Layers are passed in a cycle: the one that was passed last is needed last, but for those never passed.
        const int n     = values.n_executed();
        const int ahead = !values.is_executed(layer) ? n :
            for_layer < 0                            ? values.position(layer) :
                                                       (values.layers_between(for_layer, layer) + n - 1) % n;
        return { layer, least.expert, 0, -(double) ahead };
    }
    if (least.key == Victims::GUESSED) {
        return { layer, least.expert, 2, least.key };
    }
    return { layer, least.expert, 1, values.worth_there(layer, least.key) };
}

} // namespace pyorch
