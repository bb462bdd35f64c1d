// Which resident expert goes when another needs its memory.
//
// A policy gives each expert a value, from what is known of it alone: values of different experts, computed at
// different times, compare. So the value of an expert changes only when something is learnt about that expert. Two
// things a policy may ask for beside that. Values that take much arithmetic are made by a LearnedValue, for all experts
// of a layer at once, once that layer was visited. And where the turn of a layer counts, all values of a layer are
// discounted by the wait until its turn: that changes with every layer, but never the order within one.

#pragma once

#include "pyorch.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace pyorch {

// What a policy may know about an expert. Time counts the layers that were computed.
struct Usage {
    uint64_t last_use = 0;
    double   heat     = -INFINITY;  // log2 of its uses, fading: at time t, log2(frequency) + t / half-life
    double   learned  = 0;          // what a LearnedValue said of it last
    double   mark     = 0;          // what a policy notes of it beside that
    uint64_t came     = 0;          // when it got its memory
    uint64_t next_use = UINT64_MAX; // the truth, where it is known: in a replay
};

constexpr double HEAT_HALF_LIFE_TOKENS = 32;   // of Usage::heat
constexpr double DISCOUNT              = 0.85; // of a use that comes a token later

class EvictionPolicy {
public:
    virtual ~EvictionPolicy() = default;

    // REQUIRES: the usage outlives the policy
    virtual void used(Usage & usage, uint64_t now) = 0;

    // It went, as the least valuable.
    virtual void evicted(const Usage &) {}

    // The expert with the lowest value goes first. Finite, or -INFINITY. probability: in the forecast of its layer; 1 /
    // n_expert while there is none.
    virtual double value(const Usage & usage, float probability) const = 0;

    // What a value counts of an expert that is there, where another one need not take its place: to bring one that is
    // hardly better costs more than it gains. Replayed on routing of OLMoE's shape, twice the uses for lfu: hits stay
    // the same within half a point, and a tenth to a third is uploaded. 2.5 times the value for learned, by replays of
    // the small model: 4 times costs 4 points of a device's hits, twice uploads more and takes longer.
    virtual double settled(double value) const { return value; }

    // Whether the newer is worth more, however often either is used. Then what takes another one's place, where it need
    // not, must have been used twice as often, too: else all that comes once would go through all memory. Replayed
    // likewise, a fiftieth is uploaded then, for a third more hits.
    virtual bool by_recency() const { return false; }

    // Whether the value depends on the probability.
    virtual bool takes_forecasts() const { return false; }

    // Whether values, which are 0 or more then, are discounted by the wait until their layer's turn.
    virtual bool counts_turns() const { return false; }
};

// A layer was routed for a narrow ubatch, not a prompt's.
struct Visit {
    const void *     context;
    int              layer;
    bool             continues; // the ubatch has the next token of each sequence of the context's last ubatch
    std::vector<int> experts;   // that its router chose, ascending, each once
};

// A policy as it is chosen.
struct PolicyEntry {
    pyorch_policy kind;
    const char *  name;
    unsigned      needs; // PYORCH_NEEDS_*: who lacks one of them cannot take it
    unsigned      uses;  // PYORCH_NEEDS_*: of what makes it better
    const char *  description;

    // n_moe_layers: layers that one token passes, the unit in which old uses fade.
    std::unique_ptr<EvictionPolicy> (*make)(int n_moe_layers);

    bool learns = false; // its values, from visits of layers
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

// In the order of their kinds. Those that exist to be compared with are for replays: replay/policies/replay_policies.h.
const Policies & policy_list();

// Throws Failure where the list has no such policy.
const PolicyEntry & find_policy(const Policies & policies, pyorch_policy kind);

} // namespace pyorch
