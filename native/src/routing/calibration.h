// Mean outputs of experts, summed up while the model computes: the default vectors of Speculating Experts, section 3.1.

#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace pyorch {

class Calibration {
public:
    // n_expert: of each layer.
    explicit Calibration(const std::vector<int> & n_expert);

    void set(bool on);
    bool active() const { return on.load(std::memory_order_relaxed); }

    // outputs [n_tokens * n_used][n_embd] of the experts with these ids.
    void add(int layer, const int32_t * ids, int64_t n_slots, const float * outputs, int n_embd);

    // False if the layer's outputs have another width.
    bool means(int layer, float * vectors, uint64_t * counts, int n_embd);

private:
    struct Layer {
        int                   n_expert;
        int                   n_embd = 0;
        std::vector<double>   sums;   // [n_expert][n_embd]
        std::vector<uint64_t> counts; // [n_expert]
    };

    std::atomic<bool>  on{ false };
    std::mutex         mutex;
    std::vector<Layer> layers;
};

} // namespace pyorch
