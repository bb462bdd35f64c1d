#include "device/slot_pools.h"

#include "residency/expert.h"

#include <algorithm>
#include <iterator>

namespace pyorch {

SlotPools::SlotPools(const std::vector<int> & n_experts, const std::vector<int> & pool_of,
    const std::vector<int> & n_slots, pyorch_policy policy, const Policies & policies) :
        seats(n_experts, Values::MAY_REFUSE, policies, policy, [this](Victims & victims, int layer, int expert) {
            const Slotted & e = layers[layer].experts[expert];
            victims.set(
                layer, expert, FOR_DEMAND, e.may_go() && !e.transient ? values.value(layer, expert) : Victims::NEVER);
        }) {
    pools.resize(n_slots.size());
    for (int layer = 0; layer < values.n_layers(); ++layer) {
        layers.push_back({ pool_of[layer], std::vector<Slotted>(n_experts[layer]) });
        for (int expert = 0; expert < n_experts[layer]; ++expert) {
            layers[layer].experts[expert].layer = layer;
            layers[layer].experts[expert].id    = expert;
        }
        pools[pool_of[layer]].layers.push_back(layer);
    }
    for (size_t pool = 0; pool < pools.size(); ++pool) {
        pools[pool].n_slots = n_slots[pool];
        for (int slot = n_slots[pool] - 1; slot >= 0; --slot) {
            pools[pool].free.push_back(slot);
        }
    }
}

void SlotPools::set_limits(int layer, int min, int max) {
    values.set_limits(layer, min, max);
    shrink_layer(layer);
}

int SlotPools::slots_for(int layer) const {
    const Pool & pool = pool_of(layer);
    int          n    = pool.n_slots - pool.n_kept;
    for (int other : pool.layers) {
        n -= other != layer ? values.min(other) : 0;
    }
    return n;
}

void SlotPools::shrink_layer(int layer) {
    while (seats.order.n(layer) > values.max(layer)) {
        Slotted * goes = first_transient(pool_of(layer), layer, true);
        goes           = goes ? goes : least_of(pool_of(layer), layer, true);
        if (!goes) {
            return;
        }
        ++seats.counts(layer).device_evictions;
        give(*goes);
    }
}

void SlotPools::count_uses(int layer, const std::vector<int> & asked) {
    values.passes(layer);
    for (int expert : asked) {
        values.used(layer, expert);
        stays(layers[layer].experts[expert]);
    }
}

DevicePass SlotPools::find(int layer, const DeviceDemand & demand) {
    Layer &    l         = layers[layer];
    DevicePass pass      = { std::vector<int>(l.experts.size(), NONE) };
    int        n_lacking = 0;
    for (int expert : demand.experts) {
        const Slotted & e          = l.experts[expert];
        const bool      is_ordered = e.guess_of && e.guess_of == demand.context;
        pass.slots[expert]         = is_ordered && e.arrived ? e.slot : slot(layer, expert);
        if (is_ordered) {
            pass.ordered.push_back(expert);
        }
        if (pass.slots[expert] != NONE) {
            hold(layer, expert);
        } else if (is_ordered) {
            pass.uploads.push_back(expert);
        } else {
            ++n_lacking;
        }
    }
    pyorch_stats & counts = seats.counts(layer);
    counts.device_hits += demand.experts.size() - n_lacking;
    counts.device_misses += n_lacking;
    counts.device_ahead_hits += pass.ordered.size();
    counts.device_ahead_late += pass.uploads.size();
    return pass;
}

void SlotPools::replace(
    int layer, const DeviceDemand & demand, DevicePass & pass, const std::vector<double> & learned) {
    const bool scan         = demand.n_tokens >= Demand::SCAN_TOKENS;
    const bool brings_first = misses == PYORCH_UPLOAD;
    if (!scan) {
        count_uses(layer, demand.asked);
    }
    if (!learned.empty()) {
        values.set_learned(layer, learned);
    }
    std::vector<int> lacking, ordered;
    ordered.swap(pass.ordered);
    std::copy_if(demand.experts.begin(), demand.experts.end(), std::back_inserter(lacking), [&](int expert) {
        return pass.slots[expert] == NONE && !std::binary_search(ordered.begin(), ordered.end(), expert);
    });
    // A prompt's experts come only if the pass itself uploads them.
    if (demand.stays || (scan && !brings_first)) {
        lacking.clear();
    }
    n_needed = demand.experts.size();
    // A pass may replace one expert for each token: experts without a second use cost no more than that.
    int n_replaceable = demand.n_tokens;
    for (int expert : ordered) { // to keep it costs no upload
        bool took = false;
        if (n_replaceable > 0 && admit_ordered(layers[layer].experts[expert], took)) {
            n_replaceable -= took;
        } else {
            pass.ordered.push_back(expert);
        }
    }
    for (int expert : lacking) {
        bool took = false;
        if (known(layer, expert) || (!brings_first && n_replaceable == 0) ||
            admit(layer, expert, brings_first, took) == NONE) {
            continue;
        }
        n_replaceable -= took;
        (brings_first ? pass.uploads : pass.behind).push_back(expert);
    }
    if (ahead) {
        judge(layer, demand);
    }
}

void SlotPools::unhold(int layer, int expert) {
    Slotted & e = layers[layer].experts[expert];
    if (seats.release(e) && e.guess_of) {
        give(e);
    }
}

void SlotPools::mark_moved(int layer) {
    if (!layers[layer].moved) {
        layers[layer].moved = true;
        moved.push_back(layer);
    }
}

// It stays now, and passes through no more.
void SlotPools::stays(Slotted & e) {
    if (e.transient) {
        auto & transients = pool_of(e).transients;
        transients.erase(std::find(transients.begin(), transients.end(), &e));
        e.transient = false;
        seats.changed(e);
        mark_moved(e.layer);
    }
}

void SlotPools::give(Slotted & e) {
    if (e.guess_of) {
        give_kept(pool_of(e), e.slot);
        e.guess_of = nullptr;
    } else {
        pool_of(e).free.push_back(e.slot);
        stays(e);
        seats.go(e);
        mark_moved(e.layer);
    }
    e.slot = NONE;
}

// The first transient expert of a pool that may be evicted for an expert of a layer. of_layer: only of that layer. null:
// none.
SlotPools::Slotted * SlotPools::first_transient(const Pool & pool, int layer, bool of_layer) const {
    const auto found = std::find_if(pool.transients.begin(), pool.transients.end(), [&](const Slotted * e) {
        const bool keeps = e->layer != layer && (of_layer || seats.order.n(e->layer) <= values.min(e->layer));
        return !keeps && e->may_go();
    });
    return found != pool.transients.end() ? *found : nullptr;
}

// The least valuable of the other experts.
SlotPools::Slotted * SlotPools::least_of(const Pool & pool, int layer, bool of_layer) {
    const Victim least = seats.order.first_of(of_layer ? std::vector<int>{ layer } : pool.layers, layer, FOR_DEMAND);
    return least ? &layers[least.layer].experts[least.expert] : nullptr;
}

// Makes room for an expert that stays; false: it is worth no other expert's slot.
bool SlotPools::make_room(Slotted & e, bool must, bool & took) {
    Pool &     pool = pool_of(e);
    const bool full = seats.order.is_full(e.layer); // it takes the slot of another expert of its layer
    values.admitted(e.layer, e.id);                 // its value as if it had come
    took = full || pool.free.empty();
    if (took) {
        Slotted *  goes     = least_of(pool, e.layer, full);
        const bool worth_it = !goes || values.is_worth_more(e.layer, e.id, goes->layer, goes->id);
        if (!must && !worth_it) {
            return false;
        }
        Slotted * transient = first_transient(pool, e.layer, full);
        goes                = transient ? transient : goes;
        if (!goes) {
            return false;
        }
        ++seats.counts(goes->layer).device_evictions;
        values.evicted(goes->layer, goes->id);
        give(*goes);
        // At most as many pass through as one layer needs: after a prompt, all experts may be transient.
        if (!worth_it && pool.transients.size() < std::max<size_t>(n_needed, 1)) {
            e.transient = true;
            pool.transients.push_back(&e);
        }
    }
    return true;
}

int SlotPools::admit(int layer, int expert, bool must, bool & took) {
    Slotted & e = layers[layer].experts[expert];
    if (!make_room(e, must, took)) {
        return NONE;
    }
    std::vector<int> & free = pool_of(e).free;
    e.slot                  = free.back();
    free.pop_back();
    seats.come(e);
    mark_moved(layer);
    return e.slot;
}

void SlotPools::take_whole(int layer) {
    for (int expert = 0; expert < values.n_experts(layer); ++expert) {
        bool took;
        admit(layer, expert, true, took); // the lowest slot first
        arrived(layer, expert);
    }
}

std::vector<int> SlotPools::fill(int layer, const std::vector<int> & experts) {
    const Pool &     pool  = pool_of(layer);
    const int        share = (pool.n_slots - pool.n_kept) / (int) pool.layers.size();
    std::vector<int> admitted;
    for (int expert : experts) {
        const bool has_room = seats.n_resident(layer) + (int) admitted.size() < share && !pool.free.empty();
        if (!has_room || seats.order.is_full(layer)) {
            break;
        }
        bool took;
        if (!known(layer, expert) && admit(layer, expert, false, took) != NONE) {
            admitted.push_back(expert);
        }
    }
    return admitted;
}

void SlotPools::arrived(int layer, int expert, bool uploaded) {
    Slotted & e = layers[layer].experts[expert];
    if (e.guess_of) {
        e.arrived = true;
    } else {
        seats.arrive(e);
    }
    seats.counts(layer).device_loads += uploaded;
}

} // namespace pyorch
