#include "residency/device_table.h"

#include "residency/device_ahead.h"
#include "residency/table.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pyorch {

DeviceTable::DeviceTable(const std::vector<int> & n_experts, const std::vector<int> & pool_of,
    const std::vector<int> & n_slots, pyorch_policy which, const Policies & known) :
        pools(n_slots.size()), policies(&known), kind(which),
        policy(find_policy(known, which).make((int) n_experts.size())), victims(n_experts) {
    for (size_t layer = 0; layer < n_experts.size(); ++layer) {
        layers.push_back({ pool_of[layer], std::vector<Seated>(n_experts[layer]), 0, n_experts[layer] });
        pools[pool_of[layer]].layers.push_back((int) layer);
    }
    for (size_t pool = 0; pool < pools.size(); ++pool) {
        pools[pool].n_slots = n_slots[pool];
        for (int slot = n_slots[pool] - 1; slot >= 0; --slot) {
            pools[pool].free.push_back(slot);
        }
    }
}

DeviceTable::~DeviceTable() = default;

void DeviceTable::set_policy(pyorch_policy which) {
    kind   = which;
    policy = find_policy(*policies, which).make((int) layers.size());
    if (DeviceTable * without = without_guests()) {
        without->set_policy(which);
    }
    for (int layer = 0; layer < (int) layers.size(); ++layer) {
        for (int expert = 0; expert < (int) layers[layer].experts.size(); ++expert) {
            changed(layer, expert);
        }
    }
}

void DeviceTable::set_learned(int layer, const std::vector<double> & values) {
    if (DeviceTable * without = without_guests()) {
        without->set_learned(layer, values);
    }
    for (int expert = 0; expert < (int) layers[layer].experts.size(); ++expert) {
        layers[layer].experts[expert].usage.learned = values[expert];
        changed(layer, expert);
    }
}

void DeviceTable::foresee(int layer, int expert, uint64_t next_use) {
    if (DeviceTable * without = without_guests()) {
        without->foresee(layer, expert, next_use);
    }
    layers[layer].experts[expert].usage.next_use = next_use;
    changed(layer, expert);
}

void DeviceTable::set_limits(int layer, int min, int max) {
    if (DeviceTable * without = without_guests()) {
        without->set_limits(layer, min, max);
    }
    Layer & l = layers[layer];
    l.min     = min;
    l.max     = max;
    while (l.n_seated > max) {
        const Seat passing = least_of(pools[l.pool], layer, true, true);
        const Seat goes    = passing.expert != NONE ? passing : least_of(pools[l.pool], layer, true, false);
        if (goes.expert == NONE) {
            return;
        }
        ++l.counts.evictions;
        give(layer, goes.expert);
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
        const bool stays = e.holds > 0 || e.coming || e.guest_of || e.passing;
        victims.set(layer, expert, FOR_DEMAND, stays ? Victims::NEVER : value(layer, e));
    }
}

void DeviceTable::count_uses(int layer, const std::vector<int> & asked) {
    Layer &          l = layers[layer];
    std::vector<int> before;
    before.swap(l.fresh);
    l.last_pass = ++now;
    at_layer    = layer;
    for (int expert : asked) {
        Seated & e = l.experts[expert];
        policy->used(e.usage, now);
        if (policy->by_recency()) {
            e.usage.heat = fading_use(e.usage.heat, (double) now / (HEAT_HALF_LIFE_TOKENS * (double) layers.size()));
        }
        if (e.passing) {
            stays(layer, expert);
        }
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
int DeviceTable::n_that_pay(
    int layer, const DeviceDemand & demand, const DevicePass & pass, std::vector<int> & candidates) {
    const auto more_rows = [&](int a, int b) { return demand.rows[a] > demand.rows[b]; };
    std::stable_sort(candidates.begin(), candidates.end(), more_rows);
    std::vector<int> there, lacking;
    for (int expert : candidates) {
        lacking.push_back(demand.rows[expert]);
    }
    const auto comes = [&](int expert) {
        return std::find(pass.uploads.begin(), pass.uploads.end(), expert) != pass.uploads.end();
    };
    for (int expert : demand.experts) {
        if (pass.slots[expert] != NONE || comes(expert)) {
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
    std::vector<int> lacking, guests;
    for (int expert : demand.experts) {
        const Seated & e = l.experts[expert];
        if (e.guest_of && e.guest_of == demand.context) {
            guests.push_back(expert);
            pass.slots[expert] = e.coming ? NONE : e.slot;
        } else {
            pass.slots[expert] = slot(layer, expert);
            if (pass.slots[expert] == NONE) {
                lacking.push_back(expert);
                continue;
            }
        }
        pass.slots[expert] != NONE ? hold(layer, expert) : pass.uploads.push_back(expert);
    }
    const int n_hits = (int) (demand.experts.size() - lacking.size());
    l.counts.hits += n_hits;
    l.counts.misses += lacking.size();
    l.counts.ahead_hits += guests.size();
    l.counts.ahead_late += pass.uploads.size();
    if (demand.stays) {
        lacking.clear();
    }
    // A prompt's experts come only for their own sake.
    if (scan && !brings_first) {
        lacking.resize(misses == PYORCH_ESTIMATED ? n_that_pay(layer, demand, pass, lacking) : 0);
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
        (brings_first || scan ? pass.uploads : pass.behind).push_back(expert);
    }
    if (misses == PYORCH_ESTIMATED && !scan && !pass.behind.empty()) {
        const int n = n_that_pay(layer, demand, pass, pass.behind);
        pass.uploads.insert(pass.uploads.end(), pass.behind.begin(), pass.behind.begin() + n);
        pass.behind.erase(pass.behind.begin(), pass.behind.begin() + n);
    }
    if (ahead && misses == PYORCH_ESTIMATED) {
        estimate(layer, demand, pass);
    }
    if (ahead) {
        judge(layer, demand);
        weigh(layer, demand, learned, n_hits);
    }
    return pass;
}

int DeviceTable::slot(int layer, int expert) const {
    const Seated & e = layers[layer].experts[expert];
    return e.coming || e.guest_of ? NONE : e.slot;
}

void DeviceTable::hold(int layer, int expert) {
    ++layers[layer].experts[expert].holds;
    changed(layer, expert);
}

void DeviceTable::unhold(int layer, int expert) {
    Seated & e = layers[layer].experts[expert];
    --e.holds;
    e.guest_of && e.holds == 0 ? give(layer, expert) : changed(layer, expert);
}

void DeviceTable::move(int layer, int expert, int slot) {
    Layer & l              = layers[layer];
    l.experts[expert].slot = slot;
    l.n_seated += slot != NONE ? 1 : -1;
    mark_moved(layer);
}

void DeviceTable::mark_moved(int layer) {
    if (!layers[layer].moved) {
        layers[layer].moved = true;
        moved.push_back(layer);
    }
}

// It does not pass through any more.
void DeviceTable::stays(int layer, int expert) {
    auto & passing = pools[layers[layer].pool].passing;
    passing.erase(std::find_if(passing.begin(), passing.end(),
        [&](const Seat & seat) { return seat.layer == layer && seat.expert == expert; }));
    layers[layer].experts[expert].passing = false;
    mark_moved(layer);
}

void DeviceTable::give(int layer, int expert) {
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
    victims.set(layer, expert, FOR_DEMAND, Victims::NEVER);
}

// Who would go of a pool for an expert of a layer, NONE: of none: of those that pass through the first, of the others
// the least valuable. of_layer: of that layer alone. expert NONE: nobody can.
DeviceTable::Seat DeviceTable::least_of(const Pool & pool, int layer, bool of_layer, bool passing) {
    const auto keeps = [&](int each) {
        return each != layer && (of_layer || layers[each].n_seated <= layers[each].min);
    };
    if (passing) {
        for (const Seat & seat : pool.passing) {
            const Seated & e = layers[seat.layer].experts[seat.expert];
            if (!keeps(seat.layer) && e.holds == 0 && !e.coming) {
                return seat;
            }
        }
        return { NONE, NONE };
    }
    Seat   found  = { NONE, NONE };
    double lowest = Victims::NEVER;
    for (int each : pool.layers) {
        if (keeps(each)) {
            continue;
        }
        const Victims::Least here = victims.least(each, FOR_DEMAND);
        const double         kept = here.expert >= 0 ? worth(each, policy->settled(here.key)) : Victims::NEVER;
        if (kept < lowest) {
            found  = { each, here.expert };
            lowest = kept;
        }
    }
    return found;
}

// Clearly: see EvictionPolicy.
bool DeviceTable::is_worth_more(int layer, const Seated & expert, const Seat & seat) {
    constexpr double TWICE = 1; // of logarithms
    const Seated &   there = layers[seat.layer].experts[seat.expert];
    return worth(seat.layer, policy->settled(value(seat.layer, there))) < worth(layer, value(layer, expert)) &&
        (!policy->by_recency() || expert.usage.heat > there.usage.heat + TWICE);
}

// So that an expert can have a slot for good; false: there is none that it is worth.
bool DeviceTable::make_room(int layer, int expert, bool must, bool & took) {
    Layer &    l    = layers[layer];
    Seated &   e    = l.experts[expert];
    Pool &     pool = pools[l.pool];
    const bool full = l.n_seated >= l.max; // it takes the place of another one of its layer
    e.usage.came    = now;                 // if it comes: it is worth what it will be then
    took            = full || pool.free.empty();
    if (took) {
        const Seat least    = least_of(pool, layer, full, false);
        const bool worth_it = least.expert == NONE || is_worth_more(layer, e, least);
        if (!must && !worth_it) {
            return false;
        }
        const Seat passing = least_of(pool, layer, full, true);
        const Seat goes    = passing.expert != NONE ? passing : least;
        if (goes.expert == NONE) {
            return false;
        }
        ++layers[goes.layer].counts.evictions;
        policy->evicted(layers[goes.layer].experts[goes.expert].usage);
        give(goes.layer, goes.expert);
        // No more pass through than one layer needs: after a prompt, all may have.
        if (!worth_it && pool.passing.size() < std::max<size_t>(n_needed, 1)) {
            e.passing = true;
            pool.passing.push_back({ layer, expert });
        }
    }
    return true;
}

int DeviceTable::admit(int layer, int expert, bool must, bool & took) {
    if (!make_room(layer, expert, must, took)) {
        return NONE;
    }
    std::vector<int> & free              = pools[layers[layer].pool].free;
    layers[layer].experts[expert].coming = true;
    move(layer, expert, free.back());
    free.pop_back();
    return layers[layer].experts[expert].slot;
}

void DeviceTable::arrived(int layer, int expert) {
    Layer &  l = layers[layer];
    Seated & e = l.experts[expert];
    e.coming   = false;
    l.n_there += !e.guest_of;
    ++l.counts.loads;
    changed(layer, expert);
}

void DeviceTable::abandon(int layer, int expert) { give(layer, expert); }

void DeviceTable::mark(int layer, std::vector<uint8_t> & mask) const {
    const Layer & l = layers[layer];
    for (size_t expert = 0; expert < l.experts.size(); ++expert) {
        mask[expert] |= slot(layer, (int) expert) != NONE;
    }
}

void DeviceTable::reset_counts() {
    for (Layer & l : layers) {
        l.counts = {};
    }
}

} // namespace pyorch
