#include "residency/device_table.h"

#include <algorithm>
#include <limits>

namespace pyorch {

static pyorch_policy policy_here(pyorch_policy wanted) {
    return wanted == PYORCH_LRU || wanted == PYORCH_FIFO ? wanted : PYORCH_LFU;
}

DeviceTable::DeviceTable(const std::vector<int> & n_experts, const std::vector<int> & pool_of,
    const std::vector<int> & n_slots, pyorch_policy policy) :
        pools(n_slots.size()), policy(make_policy(policy_here(policy), (int) n_experts.size())), victims(n_experts) {
    for (size_t layer = 0; layer < n_experts.size(); ++layer) {
        layers.push_back({ pool_of[layer], std::vector<Seated>(n_experts[layer]) });
        pools[pool_of[layer]].layers.push_back((int) layer);
        for (int expert = 0; expert < n_experts[layer]; ++expert) {
            changed((int) layer, expert);
        }
    }
    for (size_t pool = 0; pool < pools.size(); ++pool) {
        for (int slot = n_slots[pool] - 1; slot >= 0; --slot) {
            pools[pool].free.push_back(slot);
        }
    }
}

double DeviceTable::value(const Seated & expert) const {
    return std::max(policy->value(expert.usage, 0, false), std::numeric_limits<double>::lowest());
}

void DeviceTable::changed(int layer, int expert) {
    const Seated & e = layers[layer].experts[expert];
    const bool     stays = e.slot == NONE || e.holds > 0 || e.coming;
    victims.set(layer, expert, FOR_DEMAND, stays ? Victims::NEVER : value(e));
}

void DeviceTable::pass(int layer, const std::vector<int> & asked) {
    ++now;
    for (int expert : asked) {
        policy->used(layers[layer].experts[expert].usage, now);
        changed(layer, expert);
    }
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

void DeviceTable::give(int layer, int expert) {
    Seated & e = layers[layer].experts[expert];
    layers[layer].n_there -= !e.coming;
    pools[layers[layer].pool].free.push_back(e.slot);
    e.slot   = NONE;
    e.coming = false;
    changed(layer, expert);
}

int DeviceTable::admit(int layer, int expert, bool must, bool & took) {
    Seated & e    = layers[layer].experts[expert];
    Pool &   pool = pools[layers[layer].pool];
    took = pool.free.empty();
    if (took) {
        Victims::Least least = { NONE, Victims::NEVER };
        int            of    = NONE;
        for (int each : pool.layers) {
            const Victims::Least here = victims.least(each, FOR_DEMAND);
            if (here.key < least.key) {
                least = here;
                of    = each;
            }
        }
        if (of == NONE || (!must && least.key >= value(e))) {
            return NONE;
        }
        ++layers[of].counts.evictions;
        give(of, least.expert);
    }
    e.slot       = pool.free.back();
    e.coming     = true;
    e.usage.came = now;
    pool.free.pop_back();
    changed(layer, expert);
    return e.slot;
}

void DeviceTable::arrived(int layer, int expert) {
    Seated & e = layers[layer].experts[expert];
    e.coming = false;
    ++layers[layer].n_there;
    ++layers[layer].counts.loads;
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
