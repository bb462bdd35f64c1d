#include "residency/values.h"

#include <algorithm>
#include <cmath>

namespace pyorch {

Values::Values(const std::vector<int> & n_experts, bool may_refuse, const Policies & policies, pyorch_policy which) :
        may_refuse(may_refuse), policies(policies), n_executed_((int) n_experts.size()) {
    for (int n : n_experts) {
        layers.push_back({ (int) layers.size(), n, 1.0f / (float) n, 0, false, true, 0,
            std::vector<float>(n, 1.0f / (float) n), std::vector<Usage>(n) });
    }
    measure_turns();
    set_policy(which);
}

void Values::set_policy(pyorch_policy which) {
    entry        = &find_policy(policies, which);
    policy       = entry->make(n_layers());
    counts_turns = policy->counts_turns();
    plain        = !counts_turns && !may_refuse;
    for (int layer = 0; layer < n_layers(); ++layer) {
        changed(layer);
    }
}

void Values::set_learned(int layer, const std::vector<double> & values) {
    for (int expert = 0; expert < n_experts(layer); ++expert) {
        layers[layer].usage[expert].learned = values[expert];
    }
    changed(layer);
}

void Values::foresee(int layer, int expert, uint64_t next_use) {
    layers[layer].usage[expert].next_use = next_use;
    changed(layer, expert);
}

void Values::set_executed(const std::vector<int> & executed) {
    n_executed_ = 0;
    for (int layer = 0; layer < n_layers(); ++layer) {
        layers[layer].position = n_executed_;
        layers[layer].executed = std::binary_search(executed.begin(), executed.end(), layer);
        n_executed_ += layers[layer].executed;
    }
    n_executed_ = std::max(n_executed_, 1);
    measure_turns();
}

void Values::set_limits(int layer, int min, int max) {
    layers[layer].min = min;
    layers[layer].max = max;
}

void Values::passes(int layer) {
    for (int expert : layers[layer].fresh) {
        changed(layer, expert);
    }
    layers[layer].fresh.clear();
    layers[layer].last_pass = ++now_;
    at_layer                = layer;
}

// For a policy by recency: the frequency decides whether an expert comes.
void Values::fade(Usage & usage) const {
    usage.heat = fading_use(usage.heat, (double) now_ / (HEAT_HALF_LIFE_TOKENS * (double) layers.size()));
}

void Values::forecast(int layer, const std::vector<float> & probability) {
    layers[layer].probability = probability;
    layers[layer].forecast    = true;
    if (policy->takes_forecasts()) {
        changed(layer);
    }
}

void Values::end_forecast(int layer) {
    layers[layer].probability.assign(n_experts(layer), even(layer));
    layers[layer].forecast = false;
    if (policy->takes_forecasts()) {
        changed(layer);
    }
}

// The nearness of a layer's turn for policies that count turns: a token passes all layers once.
void Values::measure_turns() {
    nearness.assign(n_executed_ + 1, 0);
    for (int d = 1; d <= n_executed_; ++d) {
        nearness[d] = std::pow(DISCOUNT, (double) d / n_executed_);
    }
}

double Values::turn(int layer) const {
    const Layer & l     = layers[layer];
    const int     ahead = l.position - layers[at_layer].position;
    return l.executed ? nearness[ahead > 0 ? ahead : ahead + n_executed_] : 0;
}

bool Values::is_worth_more(int layer, int expert, int layer_there, int expert_there) const {
    constexpr double TWICE = 1; // of logarithms
    return worth_there(layer_there, value(layer_there, expert_there)) < worth(layer, value(layer, expert)) &&
        (!policy->by_recency() ||
            layers[layer].usage[expert].heat > layers[layer_there].usage[expert_there].heat + TWICE);
}

int Values::next_executed(int layer) const {
    do {
        ++layer;
    } while (layer < n_layers() && !layers[layer].executed);
    return layer < n_layers() ? layer : -1;
}

int Values::layers_between(int from, int to) const {
    return ((layers[to].position - layers[from].position) % n_executed_ + n_executed_) % n_executed_;
}

} // namespace pyorch
