// What experts are worth in one memory: how they were used, what a policy makes of that, and how many of a layer's
// experts have a place there in any case, or at most.
//
// Host memory and a device have the same policies, values and limits. On purpose they differ in two ways: a device can
// refuse an expert, and it is told no forecasts. Forecasts are made as time allows, and what a device computes must not
// depend on that. Another server is no such memory: which experts it holds is planned for all servers together, by what
// each of them uses.
//
// Values know nobody's place. Each memory has an order of eviction for that (eviction_order.h), which hears of every
// value that changes.

#pragma once

#include "residency/policies/policy.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

namespace pyorch {

// Experts whose place in an order of eviction is to be computed anew.
class Changes {
public:
    explicit Changes(const std::vector<int> & n_experts) {
        for (int n : n_experts) {
            flags.emplace_back(n);
        }
        all_flags.resize(n_experts.size());
    }

    bool any() const { return !experts.empty() || !layers.empty(); }

    void add(int layer, int expert) {
        if (!flags[layer][expert]) {
            flags[layer][expert] = 1;
            experts.push_back({ layer, expert });
        }
    }

    void add(int layer) { // all of it
        if (!all_flags[layer]) {
            all_flags[layer] = 1;
            layers.push_back(layer);
        }
    }

    // Calls use(layer, expert) for all of them, and forgets them.
    template <typename Use>
    void take(Use use) {
        for (int layer : layers) {
            all_flags[layer] = 0;
            for (int expert = 0; expert < (int) flags[layer].size(); ++expert) {
                use(layer, expert);
            }
        }
        for (const auto & [layer, expert] : experts) {
            flags[layer][expert] = 0;
            use(layer, expert);
        }
        layers.clear();
        experts.clear();
    }

private:
    std::vector<std::vector<uint8_t>> flags; // by layer and expert
    std::vector<uint8_t>              all_flags;
    std::vector<std::pair<int, int>>  experts;
    std::vector<int>                  layers;
};

class Values {
public:
    // If a memory may refuse an expert, the expert is computed elsewhere: it comes only where it is clearly worth more
    // than the expert that must go (EvictionPolicy::settled, by_recency). Host memory must take each: a layer waits.
    static constexpr bool MUST_TAKE = false, MAY_REFUSE = true;

    // policies: that can be chosen. Throws Failure for another one, as set_policy() does.
    Values(const std::vector<int> & n_experts, bool may_refuse, const Policies & policies, pyorch_policy policy);

    Values(const Values &)             = delete;
    Values & operator=(const Values &) = delete;

    int                 n_layers() const { return (int) layers.size(); }
    int                 n_experts(int layer) const { return (int) layers[layer].usage.size(); }
    const PolicyEntry & chosen() const { return *entry; }

    // From now on. What a LearnedValue says has to be told anew.
    void set_policy(pyorch_policy policy);

    // What a LearnedValue says: values[n_expert].
    void set_learned(int layer, const std::vector<double> & values);

    // For a replay: when an expert will be used next, in layers that came (see Usage).
    void foresee(int layer, int expert, uint64_t next_use);

    // The layers that a token passes, ascending; all, until told. A layer that none passes has no turn.
    void set_executed(const std::vector<int> & executed);

    // Of a layer's experts `min` stay while there are so many, and no more than `max` come.
    void set_limits(int layer, int min, int max);
    int  min(int layer) const { return layers[layer].min; }
    int  max(int layer) const { return layers[layer].max; }

    // A layer comes. What it used the last time is not fresh any more.
    void passes(int layer);

    // An expert counts as used now.
    void used(int layer, int expert) {
        Usage & usage = layers[layer].usage[expert];
        policy->used(usage, now_);
        if (may_refuse && policy->by_recency()) {
            fade(usage);
        }
        layers[layer].fresh.push_back(expert);
        changed(layer, expert);
    }

    // It got memory; it went, as the least valuable.
    void came(int layer, int expert) { layers[layer].usage[expert].came = now_; }

    void evicted(int layer, int expert) { policy->evicted(layers[layer].usage[expert]); }

    // probability[n_expert]: with which the next pass of the layer needs each expert, until it is over.
    void forecast(int layer, const std::vector<float> & probability);
    void end_forecast(int layer);
    bool has_forecast(int layer) const { return layers[layer].forecast; }

    float even(int layer) const { return layers[layer].even; } // 1 / n_expert

    // That, for all of them, while there is no forecast.
    const std::vector<float> & probability(int layer) const { return layers[layer].probability; }

    // The last pass of its layer used it, or it was asked for by name since then.
    bool is_fresh(int layer, int expert) const {
        const Usage & usage = layers[layer].usage[expert];
        return usage.last_use > 0 && usage.last_use >= layers[layer].last_pass;
    }

    // Among its layer's, finite: the lowest goes first.
    double value(int layer, int expert) const {
        const Layer & l     = layers[layer];
        const double  value = policy->value(l.usage[expert], l.probability[expert]);
        return std::max(value, std::numeric_limits<double>::lowest());
    }

    // What a value in a layer counts now among those in others.
    double worth(int layer, double value) const { return counts_turns ? value * turn(layer) : value; }

    // The same of an expert that is there.
    double worth_there(int layer, double value) const {
        return plain ? value : worth(layer, may_refuse ? policy->settled(value) : value);
    }

    // Whether an expert is clearly worth more than another one that is there.
    bool is_worth_more(int layer, int expert, int layer_there, int expert_there) const;

    uint64_t now() const { return now_; } // layers that came

    int  n_executed() const { return n_executed_; }
    bool is_executed(int layer) const { return layers[layer].executed; }
    int  position(int layer) const { return layers[layer].position; } // among those that are executed

    // The layer that a token passes after this one, -1 after the last.
    int next_executed(int layer) const;

    // How far a layer lies behind another in the cycle of those that a token passes; 0 for itself.
    int layers_between(int from, int to) const;

private:
    friend class EvictionOrder; // its changes are noted

    struct Layer {
        int                position;
        int                max;
        float              even;
        int                min       = 0;
        bool               forecast  = false;
        bool               executed  = true;
        uint64_t           last_pass = 0;
        std::vector<float> probability;
        std::vector<Usage> usage;
        std::vector<int>   fresh = {}; // experts that were used or asked for by name since then
    };

    const bool                      may_refuse;
    const Policies &                policies;
    const PolicyEntry *             entry;
    std::unique_ptr<EvictionPolicy> policy;
    std::vector<Layer>              layers;
    std::vector<Changes *>          listeners;            // of each order of eviction
    bool                            counts_turns = false; // the policy does
    bool                            plain        = true;  // what is there is worth its value
    std::vector<double> nearness; // by layers until its turn: what a policy that counts turns multiplies with
    int                 n_executed_;
    int                 at_layer = 0; // that came last
    uint64_t            now_     = 0;

    void   measure_turns();
    double turn(int layer) const;
    void   fade(Usage & usage) const;

    void changed(int layer, int expert) {
        for (Changes * changes : listeners) {
            changes->add(layer, expert);
        }
    }

    void changed(int layer) {
        for (Changes * changes : listeners) {
            changes->add(layer);
        }
    }
};

} // namespace pyorch
