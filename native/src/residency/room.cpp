// How the table takes memory from some experts and gives it to others.

#include "residency/table.h"

#include <algorithm>

namespace pyorch {

// So many times a size class gives up one of its own experts although one of another class is worth less; then it takes
// the other's memory. Memory that changes its class costs the system calls and page faults, which slots that stay in
// their class never do; so it moves where a class lacks it lastingly, and not with every expert.
static constexpr int REBALANCE = 16;

bool Table::start_load(Expert & e, ReadFor read_for) {
    Layer & l = layer_of(e);
    e.slot    = bank->take(l.size_class);
    if (!e.slot) {
        return false;
    }
    e.state     = State::LOADING;
    e.read_for  = read_for;
    e.load.form = COMPUTABLE;
    e.load.slot = e.slot;
    values.came(e.layer(), e.id());
    order.came(e.layer());
    e.ready.store(0, std::memory_order_relaxed);
    return true;
}

void Table::drop(Expert & e) {
    Layer & l = layer_of(e);
    if (e.slot) {
        bank->give(e.slot);
        e.slot = {};
    }
    unstage(e.load);
    if (e.guessed_for) {
        l.guessed.erase(std::find(l.guessed.begin(), l.guessed.end(), e.id()));
        l.stats.prefetch_wasted += e.read_in_vain();
        e.guessed_for = nullptr;
    }
    if (!e.absent()) {
        order.went(e.layer());
    }
    l.n_resident -= e.resident();
    l.is_resident[e.id()] = 0;
    e.ready.store(0, std::memory_order_relaxed);
    e.state     = State::ABSENT;
    e.load.form = Form::ABSENT;
    e.read_for  = ReadFor::DEMAND;
    changed(e);
}

void Table::evict(Expert & e) {
    ++layer_of(e).stats.evictions;
    if (!passes(e)) {
        values.evicted(e.layer(), e.id());
    }
    drop(e);
}

// Whether it goes before all others, whatever its value. What a pool has too is there to be computed with now; to get
// it again costs little. What a tier above has is not asked for here.
bool Table::passes(const Expert & e) { return e.scanned() || e.above || (e.kept != Form::ABSENT && !e.read_ahead()); }

// It counts as used now.
void Table::used(Expert & e) {
    e.not_scanned();
    values.used(e.layer(), e.id());
}

void Table::compute_keys(Victims & victims, const Expert & e) {
    const bool   free  = e.resident() && !e.in_use && !e.pinned;
    const bool   waits = e.read_ahead();
    const double key   = !free ? Victims::NEVER :
        passes(e)              ? Victims::SCANNED :
        e.guessed()            ? Victims::GUESSED :
                                 values.value(e.layer(), e.id());
    // What passes has to be read no more than before. Guesses would else take the memory of experts that are full only.
    const bool fresh = values.is_fresh(e.layer(), e.id()) && !passes(e);
    victims.set(e.layer(), e.id(), FOR_DEMAND, key);
    victims.set(e.layer(), e.id(), FOR_ORDER, waits ? Victims::NEVER : key);
    victims.set(e.layer(), e.id(), FOR_GUESS, waits || fresh ? Victims::NEVER : key);
    if (!pools.any()) {
        return;
    }
    for (const Form form : { Form::COMPRESSED, Form::SM_ONLY, Form::E_ONLY }) {
        const bool may_go = e.kept == form && !e.load.staged;
        // What was read ahead is worth little until it is used: it would go before that, and be read again.
        const double worth = e.read_ahead() ? Victims::GUESSED : values.value(e.layer(), e.id());
        pools.victims(form).set(e.layer(), e.id(), FOR_DEMAND, may_go ? worth : Victims::NEVER);
    }
}

void Table::compute_changed_keys() {
    order.update([&](Victims & victims, int layer, int id) { compute_keys(victims, layers[layer].experts[id]); });
}

// The least valuable expert that may go for one of the layer (-1: for anything), and is not forecast with a higher
// probability. One of the layer's own size class is preferred.
Victim Table::choose_victim(int layer, Purpose purpose, float more_likely_than) {
    const int cls = layer < 0 ? -1 : layers[layer].size_class;
    Victim    any, own;
    compute_changed_keys();
    for (int i = 0; i < (int) layers.size(); ++i) {
        const Victim victim = order.first(i, layer, purpose, more_likely_than);
        if (victim && (!any || victim < any)) {
            any = victim;
        }
        if (victim && layers[i].size_class == cls && (!own || victim < own)) {
            own = victim;
        }
    }
    if (!own || own.layer == any.layer || own.tier != any.tier) {
        return any;
    }
    int & pushes = pressure[cls];
    int & pushed = pressure[layers[any.layer].size_class];
    if (pushes < REBALANCE) {
        ++pushes;
        pushed = std::max(pushed - 1, -REBALANCE);
        return own;
    }
    return any;
}

// Evicts until n experts of the layer fit, and only what goes before `below`. What was read ahead and not used yet goes
// only for demand; what was used in the last pass of its layer not for a guess. False if what is left is in use: the
// caller waits and tries again.
bool Table::make_room(int layer, int n, Purpose purpose, float more_likely_than, const Victim & below) {
    const Layer & l     = layers[layer];
    uint64_t      moved = 0; // bytes from other classes
    while (!bank->fits(l.size_class, n)) {
        const Victim victim = choose_victim(layer, purpose, more_likely_than);
        if (victim && victim < below) {
            Layer &  gives = layers[victim.layer];
            Expert & e     = gives.experts[victim.expert];
            evict(e);
            if (!e.displaced) {
                e.displaced = true;
                gives.displaced.push_back(victim.expert);
            }
            moved += gives.size_class != l.size_class ? gives.slot_bytes : 0;
            if (moved >= l.slot_bytes) {
                pressure[l.size_class] = 0; // the class has one slot more
                moved                  = 0;
            }
        } else if (purpose != FOR_DEMAND || !drop_queued()) {
            break;
        }
    }
    return bank->fits(l.size_class, n);
}

// Takes back a load that nobody waits for and no reader works on, for what is needed now. False if there is none; a
// guess that a reader works on ends with that request.
bool Table::drop_queued() {
    const auto may_go = [&](const Load & load) {
        const Expert & e = expert_of(load);
        return !load.stream && !e.in_use && !e.pinned && order.n(e.layer()) > values.min(e.layer());
    };
    Load * load = loads.find_queued([&](const Load & load) { return load.in_flight == 0 && may_go(load); });
    if (!load) {
        load = loads.find_queued([&](const Load & load) { return expert_of(load).guessed() && may_go(load); });
        if (load) {
            expert_of(*load).state = State::ABANDONED;
        }
        return false;
    }
    loads.take_back(*load);
    drop(expert_of(*load));
    return true;
}

// Under a budget that was lowered: what nobody holds goes at once, what running layers hold when they end.
void Table::keep_budget() {
    while (bank->matrices_taken() > bank->matrices_budget()) {
        const Victim victim = choose_victim(-1, FOR_DEMAND, INFINITY);
        if (victim) {
            evict(layers[victim.layer].experts[victim.expert]);
        } else if (!drop_queued()) {
            break;
        }
    }
}

// Evicts n experts of one layer, the least valuable first, as far as it can.
void Table::shrink_layer(int layer, int n) {
    for (; n > 0; --n) {
        compute_changed_keys();
        const Victim victim = order.first(layer, layer, FOR_DEMAND);
        if (!victim) {
            return;
        }
        evict(layers[layer].experts[victim.expert]);
    }
}

} // namespace pyorch
