// How often the routers of an engine selected each expert for the tokens of its own requests, wherever it was computed
// then. What other servers' tokens selected is not counted: their routers are there.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace pyorch {

class Activations {
public:
    // n_experts: of each layer.
    explicit Activations(const std::vector<int> & n_experts) {
        layers.reserve(n_experts.size());
        for (int n : n_experts) {
            layers.emplace_back(n);
        }
    }

    // Several contexts may count at once.
    void count(int layer, const int32_t * experts, int n_slots) {
        for (int s = 0; s < n_slots; ++s) {
            layers[layer][experts[s]].fetch_add(1, std::memory_order_relaxed);
        }
    }

    // counts: [n_expert] of the layer.
    void copy(int layer, uint64_t * counts) const {
        for (size_t e = 0; e < layers[layer].size(); ++e) {
            counts[e] = layers[layer][e].load(std::memory_order_relaxed);
        }
    }

private:
    std::vector<std::vector<std::atomic<uint64_t>>> layers;
};

} // namespace pyorch
