#include "residency/room.h"

#include "base/status.h"

#include <algorithm>

namespace pyorch {

// A size class evicts one of its own experts so many times although an expert of another class is worth less; then it
// takes the memory of the other. Memory that changes its class costs system calls and page faults. So it moves only if
// a class lacks memory lastingly.
static constexpr int REBALANCE = 16;

// The most bytes of one layer within so many tokens is the width to expect.
static constexpr uint64_t WIDTH_TOKENS = 64;

Room::Room(
    const Locked & locked, Residents & residents, StoredParts & stored, Loader & loads, const PoolShares & shares) :
        residents(residents), stored(stored), loads(loads), shares(shares), displaced(residents.n_layers()) {
    if (bank.budget() < map.floor_bytes()) {
        throw Failure(PYORCH_BUDGET,
            format("budget %s is below the floor of %s (twice the experts of a token, and one)",
                mebibytes(bank.budget()).c_str(), mebibytes(map.floor_bytes()).c_str()));
    }
    for (int layer = 0; layer < residents.n_layers(); ++layer) {
        size_class.push_back(residents[layer].size_class);
        pressure.resize(std::max(pressure.size(), (size_t) size_class.back() + 1));
    }
    divide_budget(locked, bank.budget());
}

void Room::evict(Expert & e) {
    ++residents.seats.counts(e.layer).evictions;
    if (!Residents::passes(e)) {
        values.evicted(e.layer, e.id);
    }
    residents.drop(e);
}

// The victim for an expert of the layer (-1: of any layer), with a forecast of at most more_likely_than. The layer's
// own size class is preferred.
Victim Room::choose_victim(int layer, Purpose purpose, float more_likely_than) {
    const int cls = layer < 0 ? -1 : size_class[layer];
    Victim    any, own;
    order.update();
    for (int i = 0; i < residents.n_layers(); ++i) {
        const Victim victim = order.first(i, layer, purpose, more_likely_than);
        if (!victim) {
            continue;
        }
        if (!any || victim < any) {
            any = victim;
        }
        if (size_class[i] == cls && (!own || victim < own)) {
            own = victim;
        }
    }
    if (!own || own.layer == any.layer || own.tier != any.tier) {
        return any;
    }
    int & pushes = pressure[cls];
    int & pushed = pressure[size_class[any.layer]];
    if (pushes < REBALANCE) {
        ++pushes;
        pushed = std::max(pushed - 1, -REBALANCE);
        return own;
    }
    return any;
}

bool Room::make_room(
    const Locked & locked, int layer, int n, Purpose purpose, float more_likely_than, const Victim & below) {
    const auto & l     = residents[layer];
    uint64_t     moved = 0; // bytes from other classes
    while (!bank.fits(l.size_class, n)) {
        const Victim victim = choose_victim(layer, purpose, more_likely_than);
        if (victim && victim < below) {
            const auto &       gives = residents[victim.layer];
            std::vector<int> & gone  = displaced[victim.layer];
            evict(residents.expert(victim.layer, victim.expert));
            if (std::find(gone.begin(), gone.end(), victim.expert) == gone.end()) {
                gone.push_back(victim.expert);
            }
            moved += gives.size_class != l.size_class ? gives.slot_bytes : 0;
            if (moved >= l.slot_bytes) {
                pressure[l.size_class] = 0; // the class has one slot more
                moved                  = 0;
            }
        } else if (purpose != FOR_DEMAND || !drop_queued(locked)) {
            break;
        }
    }
    return bank.fits(l.size_class, n);
}

// Ends a load that no layer waits for and no reader works on, for memory that is needed now. False if none exists. A
// guess that a reader works on ends with its current request.
bool Room::drop_queued(const Locked & locked) {
    const auto may_go = [&](const Load & load) {
        const Expert & e = residents.expert_of(load);
        return !load.stream && !e.holds && !e.pinned && order.n(load.layer) > values.min(load.layer);
    };
    Load * load = loads.find_queued(locked, [&](const Load & load) { return load.in_flight == 0 && may_go(load); });
    if (!load) {
        load = loads.find_queued(
            locked, [&](const Load & load) { return residents.expert_of(load).guessed() && may_go(load); });
        if (load) {
            residents.expert_of(*load).abandoned = true;
        }
        return false;
    }
    loads.take_back(locked, *load);
    residents.drop(residents.expert_of(*load));
    return true;
}

void Room::keep_budget(const Locked & locked) {
    while (bank.matrices_taken() > bank.matrices_budget()) {
        const Victim victim = choose_victim(-1, FOR_DEMAND, INFINITY);
        if (victim) {
            evict(residents.expert(victim.layer, victim.expert));
        } else if (!drop_queued(locked)) {
            break;
        }
    }
}

// Evicts the least valuable experts of the layer, as far as they may go.
void Room::make_room_within(int layer, int n) {
    for (int over = order.n(layer) + n - values.max(layer); over > 0; --over) {
        order.update();
        const Victim victim = order.first(layer, layer, FOR_DEMAND);
        if (!victim) {
            return;
        }
        evict(residents.expert(layer, victim.expert));
    }
}

int Room::capacity(int layer) const {
    const auto &   l      = residents[layer];
    const uint64_t others = reserved_bytes - std::max(values.min(layer), l.n_pinned) * l.slot_bytes;
    return (int) std::min<uint64_t>(l.n_expert, (bank.matrices_budget() - others) / l.slot_bytes);
}

int Room::capacity_beside_window(int layer) const {
    const int n = capacity(layer);
    return n == residents[layer].n_expert ? n : n - window(layer);
}

int Room::n_with_pinned(int layer, const std::vector<int> & experts) const {
    const auto is_unpinned = [&](int id) { return !residents.expert(layer, id).pinned; };
    return residents[layer].n_pinned + (int) std::count_if(experts.begin(), experts.end(), is_unpinned);
}

void Room::widen(const Locked & locked, int layer, const Demand & demand) {
    if (!stored.pools.any() || (demand.scans() && !demand.continues)) { // a prompt
        return;
    }
    const auto &   l      = residents[layer];
    const uint64_t others = reserved_bytes - std::max(values.min(layer), l.n_pinned) * l.slot_bytes;
    width.next            = std::max(width.next, others + n_with_pinned(layer, demand.experts) * l.slot_bytes);
    const bool ends       = values.now() >= width.begin + WIDTH_TOKENS * residents.n_layers();
    if (width.next > width.most || (ends && width.next < width.most)) {
        width.most = width.next;
        divide_budget(locked, bank.budget());
    }
    if (ends) {
        width = { width.most, 0, values.now() };
    }
}

// A wide batch uses all experts, so it says nothing.
void Room::count_regret(int layer, const Demand & demand) {
    for (int id : displaced[layer]) {
        if (!demand.scans()) {
            missed.add(std::binary_search(demand.experts.begin(), demand.experts.end(), id));
        }
    }
    displaced[layer].clear();
}

// By layer: experts that eviction cannot take.
std::vector<int> Room::reserved() const {
    std::vector<int> n;
    for (int layer = 0; layer < residents.n_layers(); ++layer) {
        n.push_back(std::max(values.min(layer), residents[layer].n_pinned));
    }
    return n;
}

void Room::reserve(const Locked & locked) {
    const std::vector<int> n = reserved();
    reserved_bytes           = 0;
    for (int layer = 0; layer < residents.n_layers(); ++layer) {
        reserved_bytes += n[layer] * residents[layer].slot_bytes;
    }
    divide_budget(locked, bank.budget());
}

// The budget under which every layer runs, whole or through its window, without the reserved memory.
uint64_t Room::needed_budget(const std::vector<int> & reserved) const {
    uint64_t all  = 0;
    uint64_t most = 0;
    for (int i = 0; i < residents.n_layers(); ++i) {
        all += reserved[i] * residents[i].slot_bytes;
    }
    for (int i = 0; i < residents.n_layers(); ++i) {
        const auto & l = residents[i];
        most           = std::max(most, all + std::min(window(i), l.n_expert - reserved[i]) * l.slot_bytes);
    }
    return most;
}

// The most bytes of the budget for full experts: pools give way to them, apart from the least that loads need.
uint64_t Room::most_for_full() const { return bank.budget() - stored.least(); }

void Room::check_pins(int layer, int n_pins) const {
    std::vector<int> n_reserved = reserved();
    n_reserved[layer]           = std::max(n_reserved[layer], residents[layer].n_pinned + n_pins);
    const uint64_t most         = needed_budget(n_reserved);
    if (most > most_for_full()) {
        throw Failure(PYORCH_BUDGET,
            format("pinning %d experts of layer %d needs a budget of %s, it is %s", n_pins, map.layers[layer].il,
                mebibytes(most).c_str(), mebibytes(most_for_full()).c_str()));
    }
}

void Room::set_limits(const Locked & locked, int layer, int min, int max) {
    const int il       = map.layers[layer].il;
    const int n_expert = residents[layer].n_expert;
    if (min < 0 || max > n_expert || min > max) {
        throw Failure(PYORCH_INVALID,
            format("limits of layer %d must be 0 <= min <= max <= %d, not %d and %d", il, n_expert, min, max));
    }
    std::vector<int> n_reserved = reserved();
    n_reserved[layer]           = std::max(n_reserved[layer], min);
    const uint64_t most         = needed_budget(n_reserved);
    if (most > most_for_full()) {
        throw Failure(PYORCH_BUDGET,
            format("a minimum of %d experts in layer %d needs a budget of %s, it is %s", min, il,
                mebibytes(most).c_str(), mebibytes(most_for_full()).c_str()));
    }
    values.set_limits(layer, min, max);
    reserve(locked);
    make_room_within(layer, 0);
}

void Room::set_budget(const Locked & locked, uint64_t bytes) {
    bytes               = std::min(bytes, map.slots_bytes());
    const uint64_t most = needed_budget(reserved()) + stored.least();
    if (bytes < most) {
        throw Failure(PYORCH_BUDGET,
            format("budget %s is below the %s that the largest layer needs beside what is reserved",
                mebibytes(bytes).c_str(), mebibytes(most).c_str()));
    }
    divide_budget(locked, bytes);
}

void Room::set_shares(const Locked & locked, const PoolShares & wanted) {
    shares = wanted;
    divide_budget(locked, bank.budget());
}

// REQUIRES: the budget is enough for the reserved memory.
void Room::divide_budget(const Locked & locked, uint64_t bytes) {
    const uint64_t needed  = needed_budget(reserved());
    const uint64_t at_once = std::max(needed, std::min(width.most, bytes - stored.least()));
    stored.pools.divide(bytes, at_once, shares, at_once);
    bank.set_budget(bytes, stored.pools.stored_limit());
    stored.trim();
    keep_budget(locked);
}

} // namespace pyorch
