// How the table takes memory from some experts and gives it to others.

#include "residency/table.h"

#include <algorithm>
#include <cmath>
#include <limits>

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
    e.state      = State::LOADING;
    e.read_for   = read_for;
    e.load.form  = COMPUTABLE;
    e.load.slot  = e.slot;
    e.usage.came = now;
    e.ready.store(0, std::memory_order_relaxed);
    ++l.n_loaded;
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
    l.n_loaded -= !e.absent();
    l.n_resident -= e.resident();
    l.is_resident[e.id()] = 0;
    e.ready.store(0, std::memory_order_relaxed);
    e.state     = State::ABSENT;
    e.load.form = Form::ABSENT;
    e.read_for  = ReadFor::DEMAND;
    value_changed(e);
}

void Table::evict(Expert & e) {
    ++layer_of(e).stats.evictions;
    if (!passes(e)) {
        policy->evicted(e.usage);
    }
    drop(e);
}

// Whether it goes before all others, whatever its value. What a pool has too is there to be computed with now; to get
// it again costs little. What a tier above has is not asked for here.
bool Table::passes(const Expert & e) { return e.scanned() || e.above || (e.kept != Form::ABSENT && !e.read_ahead()); }

// It counts as used now.
void Table::used(Expert & e) {
    policy->used(e.usage, now);
    e.not_scanned();
    layer_of(e).fresh.push_back(e.id());
    value_changed(e);
}

// What was learnt of an expert, or done with it, may change when it goes. When that is, is computed when somebody asks:
// an expert that is held, used and given back has changed once.
void Table::value_changed(Expert & e) {
    if (!e.changed) {
        e.changed = true;
        changed_experts.push_back(&e);
    }
}

void Table::values_changed(Layer & l) {
    if (!l.changed) {
        l.changed = true;
        changed_layers.push_back(&l);
    }
}

bool Table::is_fresh(const Expert & e) const {
    return e.usage.last_use > 0 && e.usage.last_use >= layers[e.layer()].last_pass;
}

double Table::value_of(const Expert & e) const {
    const float probability = layers[e.layer()].probability[e.id()];
    return std::max(policy->value(e.usage, probability, is_fresh(e)), std::numeric_limits<double>::lowest());
}

// How near the turn of a layer is, as policies count it: 1 / root(d).
void Table::measure_turns() {
    nearness.assign(n_executed + 1, 0);
    for (int d = 1; d <= n_executed; ++d) {
        nearness[d] = 1 / std::sqrt((double) d);
    }
}

// What a value in a layer counts now among those in others. A layer that no decode passes has no turn.
double Table::worth(const Layer & l, double value) const {
    if (!policy->counts_turns()) {
        return value;
    }
    const int ahead = l.position - layers[at_layer].position;
    return l.executed ? value * nearness[ahead > 0 ? ahead : ahead + n_executed] : 0;
}

void Table::compute_keys(const Expert & e) {
    const bool   free  = e.resident() && !e.in_use && !e.pinned;
    const bool   waits = e.read_ahead();
    const double key   = !free ? Victims::NEVER :
        passes(e)              ? Victims::SCANNED :
        e.guessed()            ? Victims::GUESSED :
                                 value_of(e);
    // What passes has to be read no more than before. Guesses would else take the memory of experts that are full only.
    const bool fresh = is_fresh(e) && !passes(e);
    victims.set(e.layer(), e.id(), FOR_DEMAND, key);
    victims.set(e.layer(), e.id(), FOR_ORDER, waits ? Victims::NEVER : key);
    victims.set(e.layer(), e.id(), FOR_GUESS, waits || fresh ? Victims::NEVER : key);
    if (!pools.any()) {
        return;
    }
    for (const Form form : { Form::COMPRESSED, Form::SM_ONLY, Form::E_ONLY }) {
        const bool may_go = e.kept == form && !e.load.staged;
        // What was read ahead is worth little until it is used: it would go before that, and be read again.
        const double worth = e.read_ahead() ? Victims::GUESSED : value_of(e);
        pools.victims(form).set(e.layer(), e.id(), FOR_DEMAND, may_go ? worth : Victims::NEVER);
    }
}

void Table::compute_changed_keys() {
    for (Layer * l : changed_layers) {
        l->changed = false;
        for (int id = 0; id < l->n_expert; ++id) {
            if (l->is_resident[id] || l->experts[id].kept != Form::ABSENT) {
                compute_keys(l->experts[id]);
            }
        }
    }
    for (Expert * e : changed_experts) {
        e->changed = false;
        compute_keys(*e);
    }
    changed_layers.clear();
    changed_experts.clear();
}

// The least valuable expert that may go for one of the layer (-1: for anything), and is not forecast with a higher
// probability. One of the layer's own size class is preferred.
Table::Victim Table::choose_victim(int layer, Purpose purpose, float more_likely_than) {
    const int  n   = (int) layers.size();
    const int  cls = layer < 0 ? -1 : layers[layer].size_class;
    const bool all = more_likely_than == INFINITY; // whatever its likelihood
    Victim     any, own;
    compute_changed_keys();
    for (int i = 0; i < n; ++i) {
        Layer & l = layers[i];
        // A layer that runs gives up its own for its own: its minimum is there again once they are.
        const bool kept = l.n_loaded <= l.min && !(i == layer && purpose == FOR_DEMAND);
        if (kept || (!all && !l.forecast && 1.0f / l.n_expert > more_likely_than)) {
            continue;
        }
        const Victims::Least least = all || !l.forecast ?
            victims.least(i, purpose) :
            victims.least_if(i, purpose, [&](int id) { return l.probability[id] <= more_likely_than; });
        if (least.expert < 0) {
            continue;
        }
        Victim victim = { &l.experts[least.expert], 1, worth(l, least.key) };
        if (least.key == Victims::SCANNED) {
            // Layers are passed in a cycle: the one that was passed last is needed last, but for those never passed.
            const int ahead = !l.executed ? n_executed :
                layer < 0                 ? l.position :
                                            (layers_between(layer, i) + n_executed - 1) % n_executed;
            victim          = { victim.expert, 0, -(double) ahead };
        } else if (least.key == Victims::GUESSED) {
            victim = { victim.expert, 2, least.key };
        }
        if (!any.expert || victim < any) {
            any = victim;
        }
        if (l.size_class == cls && (!own.expert || victim < own)) {
            own = victim;
        }
    }
    if (!own.expert || own.expert == any.expert || own.tier != any.tier) {
        return any;
    }
    int & pushes = pressure[cls];
    int & pushed = pressure[layer_of(*any.expert).size_class];
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
        if (victim.expert && victim < below) {
            Layer & gives = layer_of(*victim.expert);
            evict(*victim.expert);
            if (!victim.expert->displaced) {
                victim.expert->displaced = true;
                gives.displaced.push_back(victim.expert->id());
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
        const Layer &  l = layer_of(e);
        return !load.stream && !e.in_use && !e.pinned && l.n_loaded > l.min;
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
        if (victim.expert) {
            evict(*victim.expert);
        } else if (!drop_queued()) {
            break;
        }
    }
}

// Evicts n experts of one layer, the least valuable first, as far as it can.
void Table::shrink_layer(int layer, int n) {
    Layer & l = layers[layer];
    for (; n > 0; --n) {
        compute_changed_keys();
        const Victims::Least least = victims.least(layer, FOR_DEMAND);
        if (least.expert < 0) {
            return;
        }
        evict(l.experts[least.expert]);
    }
}

} // namespace pyorch
