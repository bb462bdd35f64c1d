// The values of experts in one memory: their usage, the policy's value of it, and the limits of each layer.
//
// Host memory and devices have the same policies, values and limits. They differ in two points, on purpose. A device
// can refuse an expert. And it gets no forecasts: forecasts depend on timing, and the results of a device must not.
// Other servers have no Values: one plan for all servers places their experts by the uses on each server.
//
// Values do not know which experts are in memory. The order of eviction of each memory knows it (eviction_order.h); it
// is told of every changed value.
#pragma once

#include "residency/policies/policy.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

namespace pyorch {

// Experts with an outdated key in an order of eviction.
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

    void add(int layer) { // all experts of the layer
        if (!all_flags[layer]) {
            all_flags[layer] = 1;
            layers.push_back(layer);
        }
    }

    // Calls use(layer, expert) for each expert, and empties the list.
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
    // If a memory may refuse an expert, the expert is computed elsewhere. Then it comes only if it is clearly worth
    // more than its victim (EvictionPolicy::settled, by_recency). Host memory must take each: a layer waits for it.
    static constexpr bool MUST_TAKE = false, MAY_REFUSE = true;

    // policies: the policies that may be chosen. Throws Failure for another one, as set_policy() does.
    Values(const std::vector<int> & n_experts, bool may_refuse, const Policies & policies, pyorch_policy policy);

    Values(const Values &)             = delete;
    Values & operator=(const Values &) = delete;

    int                 n_layers() const { return (int) layers.size(); }
    int                 n_experts(int layer) const { return (int) layers[layer].usage.size(); }
    const PolicyEntry & chosen() const { return *entry; }

    // From now on. The values of a LearnedValue must be set again.
    void set_policy(pyorch_policy policy);

    // values[n_expert] of a LearnedValue.
    void set_learned(int layer, const std::vector<double> & values);

    // For a replay: when an expert will be used next, counted in layers (see Usage).
    void foresee(int layer, int expert, uint64_t next_use);

    // The layers that a token passes, ascending; until this call, all. Other layers have no turn.
    void set_executed(const std::vector<int> & executed);

    // Up to `min` experts of a layer stay once they have come, and at most `max` come.
    void set_limits(int layer, int min, int max);
    int  min(int layer) const { return layers[layer].min; }
    int  max(int layer) const { return layers[layer].max; }

    // A layer comes. Its experts of the last pass are no longer fresh.
    void passes(int layer);

    // Counts a use now.
    void used(int layer, int expert) {
        Usage & usage = layers[layer].usage[expert];
        policy->used(usage, now_);
        if (may_refuse && policy->by_recency()) {
            fade(usage);
        }
        layers[layer].fresh.push_back(expert);
        changed(layer, expert);
    }

    // It got memory; or it was evicted.
    void admitted(int layer, int expert) { layers[layer].usage[expert].admitted = now_; }

    void evicted(int layer, int expert) { policy->evicted(layers[layer].usage[expert]); }

    // probability[n_expert]: that the next pass of the layer uses each expert; valid until that pass is over.
    void forecast(int layer, const std::vector<float> & probability);
    void end_forecast(int layer);
    bool has_forecast(int layer) const { return layers[layer].forecast; }

    float even(int layer) const { return layers[layer].even; } // 1 / n_expert

    // The forecast, or `even` for all experts if none is known.
    const std::vector<float> & probability(int layer) const { return layers[layer].probability; }

    // The last pass of its layer used it, or a caller has asked for it by name since.
    bool is_fresh(int layer, int expert) const {
        const Usage & usage = layers[layer].usage[expert];
        return usage.last_use > 0 && usage.last_use >= layers[layer].last_pass;
    }

    // Its value within its layer, finite: the lowest goes first.
    double value(int layer, int expert) const {
        const Layer & l     = layers[layer];
        const double  value = policy->value(l.usage[expert], l.probability[expert]);
        return std::max(value, std::numeric_limits<double>::lowest());
    }

    // The value compared across layers.
    double worth(int layer, double value) const { return counts_turns ? value * turn(layer) : value; }

    // The same for an expert in memory.
    double worth_there(int layer, double value) const {
        return plain ? value : worth(layer, may_refuse ? policy->settled(value) : value);
    }

    // Whether an expert is clearly worth more than another expert that is in memory.
    bool is_worth_more(int layer, int expert, int layer_there, int expert_there) const;

    uint64_t now() const { return now_; } // passes of layers so far

    int  n_executed() const { return n_executed_; }
    bool is_executed(int layer) const { return layers[layer].executed; }
    int  position(int layer) const { return layers[layer].position; } // among the executed layers

    // The layer that a token passes after this one, -1 after the last.
    int next_executed(int layer) const;

    // The distance from one layer to another in the cycle of layers that a token passes; 0 for itself.
    int layers_between(int from, int to) const;

private:
    friend class EvictionOrder; // it is told of changes

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
        std::vector<int>   fresh = {}; // experts that were used, or asked for by name, since the last pass
    };

    const bool                      may_refuse;
    const Policies &                policies;
    const PolicyEntry *             entry;
    std::unique_ptr<EvictionPolicy> policy;
    std::vector<Layer>              layers;
    std::vector<Changes *>          listeners;            // of each order of eviction
    bool                            counts_turns = false; // the policy counts turns
    bool                            plain        = true;  // an expert in memory counts its plain value
    std::vector<double>             nearness; // by layers until its turn: the discount of a policy that counts turns
    int                             n_executed_;
    int                             at_layer = 0; // the last layer that came
    uint64_t                        now_     = 0;

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
