// Mean outputs of experts, summed up while the model computes: the default vectors of Speculating Experts, section 3.1.

#pragma once

#include "base/mutex.h"

#include <atomic>
#include <cstdint>
#include <vector>

namespace pyorch {

class Calibration {
public:
    // n_expert: experts of each layer.
    explicit Calibration(const std::vector<int> & n_expert);

    void set(bool on);
    bool active() const { return on.load(std::memory_order_relaxed); }

    // Adds outputs [n_tokens * n_used][n_embd] of the experts with these ids.
    void add(int layer, const int32_t * ids, int64_t n_slots, const float * outputs, int n_embd);

    // Copies the means and counts of a layer. Returns false if the layer's outputs have another width.
    bool means(int layer, float * vectors, uint64_t * counts, int n_embd);

private:
    struct Layer {
        int                   n_expert;
        int                   n_embd = 0;
        std::vector<double>   sums;   // [n_expert][n_embd]
        std::vector<uint64_t> counts; // [n_expert]
    };

    std::atomic<bool>  on{ false };
    Mutex              mutex;
    std::vector<Layer> layers GUARDED_BY(mutex);
};

// Counts how often the routers of an engine selected each expert, for tokens of its own requests, on whichever server
// the expert was computed. Tokens of other servers are not counted: their routers are there.
class Activations {
public:
    // n_experts: experts of each layer.
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

    // Copies to counts [n_expert] of the layer.
    void copy(int layer, uint64_t * counts) const {
        for (size_t e = 0; e < layers[layer].size(); ++e) {
            counts[e] = layers[layer][e].load(std::memory_order_relaxed);
        }
    }

private:
    std::vector<std::vector<std::atomic<uint64_t>>> layers;
};

} // namespace pyorch
