// Eviction policies: which resident expert is evicted when another one needs its memory.
//
// A policy computes the value of an expert from the usage of that expert alone. Values of different experts, computed
// at different times, compare. So a value changes only when the expert's usage does. There are two extensions. A
// LearnedValue computes the values of all experts of a layer at once, after a visit. And a policy may count turns: all
// values of a layer are discounted by the wait until its turn. The discount changes with every layer, but never the
// order within one.

#pragma once

#include "pyorch.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace pyorch {

// The usage of an expert. Time counts computed layers.
struct Usage {
    uint64_t last_use = 0;
    double   heat     = -INFINITY;  // log2 of its uses, fading: at time t, log2(frequency) + t / half-life
    double   learned  = 0;          // the last value of a LearnedValue
    double   mark     = 0;          // for the policy's own use
    uint64_t admitted = 0;          // when it got its memory
    uint64_t next_use = UINT64_MAX; // the truth, in a replay
};

constexpr double HEAT_HALF_LIFE_TOKENS = 32;   // of Usage::heat
constexpr double DISCOUNT              = 0.85; // of a use that comes a token later

class EvictionPolicy {
public:
    virtual ~EvictionPolicy() = default;

    // REQUIRES: the usage outlives the policy
    virtual void used(Usage & usage, uint64_t now) = 0;

    // It was evicted.
    virtual void evicted(const Usage &) {}

    // The expert with the lowest value is evicted first. Finite, or -INFINITY. probability: of the forecast of its
    // layer; 1 / n_expert without one.
    virtual double value(const Usage & usage, float probability) const = 0;

    // The value of an expert in memory, against one that need not come: to bring an expert that is hardly better costs
    // more than it gains. lfu: twice the uses; replayed on routing of OLMoE's shape, hits stay within half a point, and
    // a tenth to a third is uploaded. learned: 2.5 times the value, by replays of the small model: 4 times costs 4
    // points of a device's hits, twice uploads more and takes longer.
    virtual double settled(double value) const { return value; }

    // Whether the more recent expert is worth more, however often either is used. Then an expert that need not come
    // must have been used twice as often, too: otherwise every expert that is used once would pass through the memory.
    // In the same replays it uploads a fiftieth, for a third more hits.
    virtual bool by_recency() const { return false; }

    // Whether the value depends on the probability.
    virtual bool takes_forecasts() const { return false; }

    // Whether values, then 0 or more, are discounted by the wait until their layer's turn.
    virtual bool counts_turns() const { return false; }
};

// A layer was routed for a narrow ubatch, not for a prompt.
struct Visit {
    const void *     context;
    int              layer;
    bool             continues; // the ubatch has the next token of each sequence of the context's last ubatch
    std::vector<int> experts;   // the router's choice, ascending, each once
};

// An eviction policy of the list.
struct PolicyEntry {
    pyorch_policy kind;
    const char *  name;
    unsigned      needs; // PYORCH_NEEDS_*: without one of them the policy cannot be chosen
    unsigned      uses;  // PYORCH_NEEDS_*: they make it better
    const char *  description;

    // n_moe_layers: the layers that one token passes, the unit of fading.
    std::unique_ptr<EvictionPolicy> (*make)(int n_moe_layers);

    bool learns = false; // its values, from the visits of layers
};

using Policies = std::vector<PolicyEntry>;

template <typename Policy>
std::unique_ptr<EvictionPolicy> make_policy(int n_moe_layers) {
    if constexpr (std::is_default_constructible_v<Policy>) {
        return std::make_unique<Policy>();
    } else {
        return std::make_unique<Policy>(n_moe_layers);
    }
}

// log2(2^heat + 1), with all heat fading: how Usage::heat changes when an expert is used. fading: the time in
// half-lives.
inline double fading_use(double heat, double fading) { return std::log2(std::exp2(heat - fading) + 1) + fading; }

// In the order of their kinds. Policies for comparison are for replays: replay/policies/replay_policies.h.
const Policies & policy_list();

// Throws Failure if the list has no such policy.
const PolicyEntry & find_policy(const Policies & policies, pyorch_policy kind);

} // namespace pyorch
