// Which resident expert goes when another needs its memory.
//
// A policy gives each expert a value, from what is known of it alone: values of different experts, computed at
// different times, compare. So the value of an expert changes only when something is learnt about that expert.

#pragma once

#include "pyorch.h"

#include <cmath>
#include <cstdint>
#include <memory>

namespace pyorch {

// What a policy may know about an expert. Time counts the layers that were computed.
struct Usage {
    uint64_t last_use = 0;
    double   heat     = -INFINITY;  // log2 of its uses, fading: at time t, log2(frequency) + t / half-life
    uint64_t next_use = UINT64_MAX; // the truth, where it is known: in a replay
};

class EvictionPolicy {
public:
    virtual ~EvictionPolicy() = default;

    virtual void   used(Usage & usage, uint64_t now) const = 0;

    // The expert with the lowest value goes first. Finite, or -INFINITY. probability: in the forecast of its layer; 1 /
    // n_expert while there is none.
    virtual double value(const Usage & usage, float probability) const = 0;

    // Whether the value depends on the probability.
    virtual bool   takes_forecasts() const { return false; }
};

// n_moe_layers: layers that one token passes, the unit in which old uses fade.
std::unique_ptr<EvictionPolicy> make_policy(pyorch_policy policy, int n_moe_layers);

} // namespace pyorch
