#include "device/slot_pools.h"

#include "device/guests.h"
#include "residency/table.h"

#include <algorithm>
#include <iterator>

namespace pyorch {

SlotPools::SlotPools(const std::vector<int> & n_experts, const std::vector<int> & pool_of,
    const std::vector<int> & n_slots, pyorch_policy policy, const Policies & policies) :
        values(n_experts, DEVICE, policies, policy), eviction(values, keys()) {
    pools.resize(n_slots.size());
    for (int layer = 0; layer < values.n_layers(); ++layer) {
        layers.push_back({ pool_of[layer], std::vector<Seated>(values.n_experts(layer)) });
        pools[pool_of[layer]].layers.push_back(layer);
    }
    for (size_t pool = 0; pool < pools.size(); ++pool) {
        pools[pool].n_slots = n_slots[pool];
        for (int slot = n_slots[pool] - 1; slot >= 0; --slot) {
            pools[pool].free.push_back(slot);
        }
    }
}

SlotPools::~SlotPools() = default;

EvictionOrder::SetKeys SlotPools::keys() {
    return [this](Victims & victims, int layer, int expert) {
        const Seated & e      = layers[layer].experts[expert];
        const bool     may_go = e.slot != NONE && e.holds == 0 && !e.coming && !e.guest_of && !e.passing;
        victims.set(layer, expert, FOR_DEMAND, may_go ? values.value(layer, expert) : Victims::NEVER);
    };
}

void SlotPools::set_limits(int layer, int min, int max) {
    values.set_limits(layer, min, max);
    shrink_layer(layer);
}

void SlotPools::shrink_layer(int layer) {
    while (eviction.n(layer) > values.max(layer)) {
        const Seat goes = goes_first(pools[layers[layer].pool], layer, true);
        if (goes.expert == NONE) {
            return;
        }
        ++layers[layer].counts.device_evictions;
        give(layer, goes.expert);
    }
}

void SlotPools::count_uses(int layer, const std::vector<int> & asked) {
    values.passes(layer);
    for (int expert : asked) {
        values.used(layer, expert);
        if (layers[layer].experts[expert].passing) {
            stays(layer, expert);
        }
    }
}

DevicePass SlotPools::find(int layer, const DeviceDemand & demand) {
    Layer &    l         = layers[layer];
    DevicePass pass      = { std::vector<int>(l.experts.size(), NONE) };
    int        n_lacking = 0, n_guests = 0;
    for (int expert : demand.experts) {
        const Seated & e = l.experts[expert];
        if (e.guest_of && e.guest_of == demand.context) {
            ++n_guests;
            pass.guests.push_back(expert);
            pass.slots[expert] = e.coming ? NONE : e.slot;
        } else {
            pass.slots[expert] = slot(layer, expert);
            if (pass.slots[expert] == NONE) {
                ++n_lacking;
                continue;
            }
        }
        pass.slots[expert] != NONE ? hold(layer, expert) : pass.uploads.push_back(expert);
    }
    l.counts.device_hits += demand.experts.size() - n_lacking;
    l.counts.device_misses += n_lacking;
    l.counts.device_ahead_hits += n_guests;
    l.counts.device_ahead_late += pass.uploads.size();
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
    std::vector<int> lacking, guests;
    guests.swap(pass.guests);
    std::copy_if(demand.experts.begin(), demand.experts.end(), std::back_inserter(lacking), [&](int expert) {
        return pass.slots[expert] == NONE && !std::binary_search(guests.begin(), guests.end(), expert);
    });
    if (demand.stays) {
        lacking.clear();
    }
    // A prompt's experts come only for their own sake.
    if (scan && !brings_first) {
        lacking.clear();
    }
    n_needed = demand.experts.size();
    // Of what is there, a pass may replace one expert for each token: what nobody uses again costs no more than that.
    int n_replaceable = demand.n_tokens;
    for (int expert : guests) { // that it stays costs no upload
        bool took = false;
        if (n_replaceable > 0 && admit_guest(layer, expert, took)) {
            n_replaceable -= took;
        } else {
            pass.guests.push_back(expert);
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

int SlotPools::slot(int layer, int expert) const {
    const Seated & e = layers[layer].experts[expert];
    return e.coming || e.guest_of ? NONE : e.slot;
}

void SlotPools::hold(int layer, int expert) {
    ++layers[layer].experts[expert].holds;
    changed(layer, expert);
}

void SlotPools::unhold(int layer, int expert) {
    Seated & e = layers[layer].experts[expert];
    --e.holds;
    e.guest_of && e.holds == 0 ? give(layer, expert) : changed(layer, expert);
}

void SlotPools::move(int layer, int expert, int slot) {
    layers[layer].experts[expert].slot = slot;
    slot != NONE ? eviction.came(layer) : eviction.went(layer);
    changed(layer, expert);
    mark_moved(layer);
}

void SlotPools::mark_moved(int layer) {
    if (!layers[layer].moved) {
        layers[layer].moved = true;
        moved.push_back(layer);
    }
}

// It does not pass through any more.
void SlotPools::stays(int layer, int expert) {
    auto & passing = pools[layers[layer].pool].passing;
    passing.erase(std::find_if(passing.begin(), passing.end(),
        [&](const Seat & seat) { return seat.layer == layer && seat.expert == expert; }));
    layers[layer].experts[expert].passing = false;
    changed(layer, expert);
    mark_moved(layer);
}

void SlotPools::give(int layer, int expert) {
    Layer &  l = layers[layer];
    Seated & e = l.experts[expert];
    if (e.guest_of) {
        give_kept(pools[l.pool], e.slot);
        e.slot     = NONE;
        e.coming   = false;
        e.guest_of = nullptr;
        return;
    }
    l.n_there -= !e.coming;
    pools[l.pool].free.push_back(e.slot);
    e.coming = false;
    if (e.passing) {
        stays(layer, expert);
    }
    move(layer, expert, NONE);
}

// Of those that pass through, the first of a pool that may go for an expert of a layer (NONE: for anything). of_layer:
// of that layer alone. expert NONE: nobody can.
SlotPools::Seat SlotPools::first_passing(const Pool & pool, int layer, bool of_layer) const {
    for (const Seat & seat : pool.passing) {
        const Seated & e     = layers[seat.layer].experts[seat.expert];
        const bool     keeps = seat.layer != layer && (of_layer || eviction.n(seat.layer) <= values.min(seat.layer));
        if (!keeps && e.holds == 0 && !e.coming) {
            return seat;
        }
    }
    return { NONE, NONE };
}

// The least valuable of the others.
SlotPools::Seat SlotPools::least_of(const Pool & pool, int layer, bool of_layer) {
    Victim least;
    eviction.update();
    for (int each : pool.layers) {
        const Victim victim = !of_layer || each == layer ? eviction.first(each, layer, FOR_DEMAND) : Victim();
        if (victim && (!least || victim < least)) {
            least = victim;
        }
    }
    return { least.layer, least.expert };
}

SlotPools::Seat SlotPools::goes_first(const Pool & pool, int layer, bool of_layer) {
    const Seat passing = first_passing(pool, layer, of_layer);
    return passing.expert != NONE ? passing : least_of(pool, layer, of_layer);
}

// So that an expert can have a slot for good; false: there is none that it is worth.
bool SlotPools::make_room(int layer, int expert, bool must, bool & took) {
    Layer &    l    = layers[layer];
    Seated &   e    = l.experts[expert];
    Pool &     pool = pools[l.pool];
    const bool full = eviction.is_full(layer); // it takes the place of another one of its layer
    values.came(layer, expert);                // if it comes: it is worth what it will be then
    took = full || pool.free.empty();
    if (took) {
        const Seat least    = least_of(pool, layer, full);
        const bool worth_it = least.expert == NONE || values.is_worth_more(layer, expert, least.layer, least.expert);
        if (!must && !worth_it) {
            return false;
        }
        const Seat passing = first_passing(pool, layer, full);
        const Seat goes    = passing.expert != NONE ? passing : least;
        if (goes.expert == NONE) {
            return false;
        }
        ++layers[goes.layer].counts.device_evictions;
        values.evicted(goes.layer, goes.expert);
        give(goes.layer, goes.expert);
        // No more pass through than one layer needs: after a prompt, all may have.
        if (!worth_it && pool.passing.size() < std::max<size_t>(n_needed, 1)) {
            e.passing = true;
            pool.passing.push_back({ layer, expert });
        }
    }
    return true;
}

int SlotPools::admit(int layer, int expert, bool must, bool & took) {
    if (!make_room(layer, expert, must, took)) {
        return NONE;
    }
    std::vector<int> & free              = pools[layers[layer].pool].free;
    layers[layer].experts[expert].coming = true;
    move(layer, expert, free.back());
    free.pop_back();
    return layers[layer].experts[expert].slot;
}

void SlotPools::take_whole(int layer) {
    for (int expert = 0; expert < values.n_experts(layer); ++expert) {
        bool took;
        admit(layer, expert, true, took); // the lowest slot first
        arrived(layer, expert);
    }
}

std::vector<int> SlotPools::fill(int layer, const std::vector<int> & experts) {
    const Pool &     pool  = pools[layers[layer].pool];
    const int        share = (pool.n_slots - pool.n_kept) / (int) pool.layers.size();
    std::vector<int> admitted;
    for (int expert : experts) {
        const bool has_room = layers[layer].n_there + (int) admitted.size() < share && !pool.free.empty();
        if (!has_room || eviction.is_full(layer)) {
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
    Layer &  l = layers[layer];
    Seated & e = l.experts[expert];
    e.coming   = false;
    l.n_there += !e.guest_of;
    l.counts.device_loads += uploaded;
    changed(layer, expert);
}

void SlotPools::abandon(int layer, int expert) { give(layer, expert); }

void SlotPools::mark(int layer, std::vector<uint8_t> & mask) const {
    const Layer & l = layers[layer];
    for (size_t expert = 0; expert < l.experts.size(); ++expert) {
        mask[expert] |= slot(layer, (int) expert) != NONE;
    }
}

void SlotPools::reset_counts() {
    for (Layer & l : layers) {
        l.counts = {};
    }
}

} // namespace pyorch
