// Eviction by fading frequency, where how fast it fades is found while running.
//
// Of each rate there is a copy of the cache that only notes what it would hold. All see what layers ask for, so each
// choice is judged in full: the rate that lately hit most often gives the values.

#pragma once

#include "residency/policies/policy.h"
#include "residency/victims.h"

namespace pyorch {

class DecayBandit : public Learner {
public:
    // slot_bytes: of an expert of each layer.
    DecayBandit(const std::vector<int> & n_experts, const std::vector<uint64_t> & slot_bytes);

    void                        visit(const Visit & visit) override;
    const std::vector<double> & values(int layer) const override { return arms[leader].heat[layer]; }
    bool                        all_changed() const override { return switched; }

private:
    struct Arm {
        double                            half_life; // in layers
        std::vector<std::vector<double>>  heat;      // [n_expert] of each layer, as Usage::heat
        std::vector<std::vector<uint8_t>> held;      // [n_expert] of each layer
        Victims                           victims;
        uint64_t                          taken = 0; // bytes
        double                            hits  = 0; // fading
    };

    const std::vector<uint64_t> slot_bytes;
    std::vector<Arm>            arms;
    size_t                      leader   = 0;
    uint64_t                    now      = 0; // layers visited
    bool                        switched = false;

    void play(Arm & arm, const Visit & visit);
};

} // namespace pyorch
