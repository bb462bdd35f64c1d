#include "routing/substitute/order.h"

#include <algorithm>
#include <numeric>

namespace pyorch {

SlotOrder::SlotOrder(const pyorch_substitution & settings, double max_weight, int n_used) :
        settings(settings), max_weight(max_weight), order(n_used), by_weight(n_used), sacred(n_used) {}

const std::vector<int> & SlotOrder::of(const float * weights) {
    std::iota(order.begin(), order.end(), 0); // the router's order
    if (settings.order == PYORCH_ORDER_WEIGHT || settings.sacred > 0) {
        // Of equal weights, the expert with the lower rank counts as lighter.
        by_weight.assign(order.rbegin(), order.rend());
        std::stable_sort(by_weight.begin(), by_weight.end(), [&](int a, int b) { return weights[a] < weights[b]; });
    }
    const int n_used = (int) order.size();
    std::transform(weights, weights + n_used, sacred.begin(), [&](float weight) { return weight >= max_weight; });
    for (int i = 0; i < std::min(settings.sacred, n_used); ++i) {
        sacred[by_weight[n_used - 1 - i]] = 1;
    }
    if (settings.order == PYORCH_ORDER_WEIGHT) {
        order = by_weight;
    }
    return order;
}

} // namespace pyorch
