#include "residency/device_table.h"

#include "residency/table.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pyorch {

DeviceTable::DeviceTable(const std::vector<int> & n_experts, const std::vector<int> & pool_of,
    const std::vector<int> & n_slots, pyorch_policy which) :
        pools(n_slots.size()), policy(make_policy(which, (int) n_experts.size())), victims(n_experts) {
    for (size_t layer = 0; layer < n_experts.size(); ++layer) {
        layers.push_back({ pool_of[layer], std::vector<Seated>(n_experts[layer]), 0, n_experts[layer] });
        pools[pool_of[layer]].layers.push_back((int) layer);
    }
    for (size_t pool = 0; pool < pools.size(); ++pool) {
        for (int slot = n_slots[pool] - 1; slot >= 0; --slot) {
            pools[pool].free.push_back(slot);
        }
    }
}

void DeviceTable::set_policy(pyorch_policy which) {
    policy = make_policy(which, (int) layers.size());
    for (int layer = 0; layer < (int) layers.size(); ++layer) {
        for (int expert = 0; expert < (int) layers[layer].experts.size(); ++expert) {
            changed(layer, expert);
        }
    }
}

void DeviceTable::set_learned(int layer, const std::vector<double> & values) {
    for (int expert = 0; expert < (int) layers[layer].experts.size(); ++expert) {
        layers[layer].experts[expert].usage.learned = values[expert];
        changed(layer, expert);
    }
}

void DeviceTable::foresee(int layer, int expert, uint64_t next_use) {
    layers[layer].experts[expert].usage.next_use = next_use;
    changed(layer, expert);
}

void DeviceTable::set_limits(int layer, int min, int max) {
    Layer & l = layers[layer];
    l.min = min;
    l.max = max;
    for (auto least = victims.least(layer, FOR_DEMAND); l.n_seated > max && least.expert >= 0;
         least = victims.least(layer, FOR_DEMAND)) {
        ++l.counts.evictions;
        give(layer, least.expert);
    }
}

// A value by itself: of no forecast, and wherever the layer is in the cycle of layers.
double DeviceTable::value(int layer, const Seated & expert) const {
    const Layer & l     = layers[layer];
    const bool    fresh = expert.usage.last_use > 0 && expert.usage.last_use >= l.last_pass;
    const auto    none  = 1.0f / (float) l.experts.size();
    return std::max(policy->value(expert.usage, none, fresh), std::numeric_limits<double>::lowest());
}

// What a value in a layer counts among those in others, see EvictionPolicy::counts_turns.
double DeviceTable::worth(int layer, double value) const {
    if (!policy->counts_turns()) {
        return value;
    }
    const int n     = (int) layers.size();
    const int ahead = (layer - at_layer + n - 1) % n + 1;
    return value / std::sqrt((double) ahead);
}

void DeviceTable::changed(int layer, int expert) {
    const Seated & e = layers[layer].experts[expert];
    if (e.slot != NONE) {
        victims.set(layer, expert, FOR_DEMAND, e.holds > 0 || e.coming ? Victims::NEVER : value(layer, e));
    }
}

void DeviceTable::count_uses(int layer, const std::vector<int> & asked) {
    Layer & l = layers[layer];
    std::vector<int> before;
    before.swap(l.fresh);
    l.last_pass = ++now;
    at_layer    = layer;
    for (int expert : asked) {
        policy->used(l.experts[expert].usage, now);
        changed(layer, expert);
        l.fresh.push_back(expert);
    }
    for (int expert : before) {
        changed(layer, expert);
    }
}

void DeviceTable::set_misses(pyorch_device_misses how, const DeviceRates & by, std::vector<uint64_t> bytes) {
    misses       = how;
    rates        = by;
    expert_bytes = std::move(bytes);
}

// How many of the candidates are sooner uploaded and computed on the device; these become the first of them.
int DeviceTable::n_that_pay(int layer, const DeviceDemand & demand, const DevicePass & pass,
    std::vector<int> & candidates) {
    const auto more_rows = [&](int a, int b) { return demand.rows[a] > demand.rows[b]; };
    std::stable_sort(candidates.begin(), candidates.end(), more_rows);
    std::vector<int> there, lacking;
    for (int expert : candidates) {
        lacking.push_back(demand.rows[expert]);
    }
    for (int expert : demand.experts) {
        if (pass.slots[expert] != NONE) {
            there.push_back(demand.rows[expert]);
        } else if (std::find(candidates.begin(), candidates.end(), expert) == candidates.end()) {
            lacking.push_back(demand.rows[expert]);
        }
    }
    return uploads_that_pay(rates, expert_bytes[layer], there, lacking, (int) candidates.size());
}

DevicePass DeviceTable::pass(int layer, const DeviceDemand & demand, const std::vector<double> * learned) {
    const bool scan         = demand.n_tokens >= Demand::SCAN_TOKENS;
    const bool brings_first = misses == PYORCH_UPLOAD;
    if (!scan) {
        count_uses(layer, demand.asked);
    }
    if (learned) {
        set_learned(layer, *learned);
    }
    Layer &          l    = layers[layer];
    DevicePass       pass = { std::vector<int>(l.experts.size(), NONE) };
    std::vector<int> lacking;
    for (int expert : demand.experts) {
        pass.slots[expert] = slot(layer, expert);
        if (pass.slots[expert] != NONE) {
            ++l.counts.hits;
            hold(layer, expert);
        } else {
            ++l.counts.misses;
            lacking.push_back(expert);
        }
    }
    // A prompt's experts come only for their own sake.
    if (scan && !brings_first) {
        lacking.resize(misses == PYORCH_ESTIMATED ? n_that_pay(layer, demand, pass, lacking) : 0);
    }
    // Of what is there, a pass may replace one expert for each token: what nobody uses again costs no more than that.
    int n_replaceable = demand.n_tokens;
    for (int expert : lacking) {
        bool took = false;
        if (known(layer, expert) || (!brings_first && n_replaceable == 0) ||
            admit(layer, expert, brings_first, took) == NONE) {
            continue;
        }
        n_replaceable -= took;
        (brings_first || scan ? pass.uploads : pass.behind).push_back(expert);
    }
    if (misses == PYORCH_ESTIMATED && !scan && !pass.behind.empty()) {
        const int n = n_that_pay(layer, demand, pass, pass.behind);
        pass.uploads.assign(pass.behind.begin(), pass.behind.begin() + n);
        pass.behind.erase(pass.behind.begin(), pass.behind.begin() + n);
    }
    return pass;
}

int DeviceTable::slot(int layer, int expert) const {
    const Seated & e = layers[layer].experts[expert];
    return e.coming ? NONE : e.slot;
}

void DeviceTable::hold(int layer, int expert) {
    ++layers[layer].experts[expert].holds;
    changed(layer, expert);
}

void DeviceTable::unhold(int layer, int expert) {
    --layers[layer].experts[expert].holds;
    changed(layer, expert);
}

void DeviceTable::move(int layer, int expert, int slot) {
    Layer & l = layers[layer];
    l.experts[expert].slot = slot;
    l.n_seated += slot != NONE ? 1 : -1;
    if (!l.moved) {
        l.moved = true;
        moved.push_back(layer);
    }
}

void DeviceTable::give(int layer, int expert) {
    Layer &  l = layers[layer];
    Seated & e = l.experts[expert];
    l.n_there -= !e.coming;
    pools[l.pool].free.push_back(e.slot);
    e.coming = false;
    move(layer, expert, NONE);
    victims.set(layer, expert, FOR_DEMAND, Victims::NEVER);
}

int DeviceTable::admit(int layer, int expert, bool must, bool & took) {
    Layer &    l    = layers[layer];
    Seated &   e    = l.experts[expert];
    Pool &     pool = pools[l.pool];
    const bool full = l.n_seated >= l.max; // it takes the place of another one of its layer
    e.usage.came = now;                    // if it comes: it is worth what it will be then
    took = full || pool.free.empty();
    if (took) {
        Victims::Least least  = { NONE, Victims::NEVER };
        double         lowest = Victims::NEVER;
        int            of     = NONE;
        for (int each : pool.layers) {
            if (each != layer && (full || layers[each].n_seated <= layers[each].min)) {
                continue;
            }
            const Victims::Least here = victims.least(each, FOR_DEMAND);
            const double         kept = here.expert >= 0 ? worth(each, policy->settled(here.key)) : Victims::NEVER;
            if (kept < lowest) {
                least  = here;
                lowest = kept;
                of     = each;
            }
        }
        if (of == NONE || (!must && lowest >= worth(layer, value(layer, e)))) {
            return NONE;
        }
        ++layers[of].counts.evictions;
        policy->evicted(layers[of].experts[least.expert].usage);
        give(of, least.expert);
    }
    e.coming = true;
    move(layer, expert, pool.free.back());
    pool.free.pop_back();
    return e.slot;
}

void DeviceTable::arrived(int layer, int expert) {
    Layer &  l = layers[layer];
    Seated & e = l.experts[expert];
    e.coming = false;
    ++l.n_there;
    ++l.counts.loads;
    changed(layer, expert);
}

void DeviceTable::abandon(int layer, int expert) {
    give(layer, expert);
}

void DeviceTable::mark(int layer, std::vector<uint8_t> & mask) const {
    const Layer & l = layers[layer];
    for (size_t expert = 0; expert < l.experts.size(); ++expert) {
        mask[expert] |= l.experts[expert].slot != NONE && !l.experts[expert].coming;
    }
}

void DeviceTable::reset_counts() {
    for (Layer & l : layers) {
        l.counts = {};
    }
}

} // namespace pyorch
