// Which resident expert goes when another needs its memory.

#pragma once

#include "pyorch.h"

#include <cstdint>
#include <memory>

namespace pyorch {

// What a policy may know about an expert. Time counts the layers that were computed.
struct Usage {
    uint64_t last_use    = 0;
    float    frequency   = 0; // of uses, as the policy counts them, at last_use
    float    probability = 0; // its share in the last forecast of its layer; 1 / n_expert before any
    uint64_t next_use    = UINT64_MAX; // the truth, where it is known: in a replay
};

class EvictionPolicy {
public:
    virtual ~EvictionPolicy() = default;

    virtual void   used(Usage & usage, uint64_t now) const = 0;

    // The expert with the lowest value goes first.
    virtual double value(const Usage & usage, uint64_t now) const = 0;
};

// n_moe_layers: layers that one token passes, the unit in which old uses fade.
std::unique_ptr<EvictionPolicy> make_policy(pyorch_policy policy, int n_moe_layers);

} // namespace pyorch
