#include "residency/residents.h"

#include "base/status.h"

#include <algorithm>
#include <numeric>

namespace pyorch {

static uint64_t mean_read_bytes(const MoeLayer & layer) {
    if (!is_compressed(layer)) {
        return layer.slot_bytes();
    }
    uint64_t bytes = 0;
    for (const auto & of_part : layer.pack->part_bytes) {
        bytes = std::accumulate(of_part.begin(), of_part.end(), bytes);
    }
    return bytes / layer.n_expert;
}

Residents::Residents(const ModelMap & map, Bank & bank, const Policies & policies, pyorch_policy policy,
    EvictionOrder::SetKeys set_keys) :
        map(map), bank(bank), seats(map.n_experts(), Values::MUST_TAKE, policies, policy, std::move(set_keys)),
        layers(map.layers.size()) {
    for (int i = 0; i < n_layers(); ++i) {
        Layer & layer    = layers[i];
        layer.n_expert   = map.layers[i].n_expert;
        layer.size_class = bank.size_class(i, PART_MATRICES);
        layer.slot_bytes = map.layers[i].slot_bytes();
        layer.read_bytes = mean_read_bytes(map.layers[i]);
        layer.experts    = std::make_unique<Expert[]>(layer.n_expert);
        for (int id = 0; id < layer.n_expert; ++id) {
            Expert & e = layer.experts[id];
            e.layer = e.load.layer = i;
            e.id = e.load.expert = id;
            e.elsewhere          = map.layers[i].lacks(id);
        }
    }
}

Expert & Residents::checked(int layer, int32_t id) {
    if (id < 0 || id >= layers[layer].n_expert) {
        throw Failure(PYORCH_INVALID,
            format("layer %d has experts 0 to %d, not %d", map.layers[layer].il, layers[layer].n_expert - 1, id));
    }
    return expert(layer, id);
}

void Residents::pin(Expert & e) {
    e.pinned    = true;
    e.abandoned = false;
    e.not_scanned();
    ++layer_of(e).n_pinned;
    seats.changed(e);
}

void Residents::unpin(Expert & e) {
    e.pinned = false;
    --layer_of(e).n_pinned;
    used(e);
}

void Residents::set_above(Expert & e, bool is) {
    if (e.above == is) {
        return;
    }
    Layer &   l    = layer_of(e);
    const int step = is ? 1 : -1;
    l.n_above += step;
    l.n_only_above += e.resident() ? 0 : step;
    e.above = is;
    seats.changed(e);
}

bool Residents::start_load(Expert & e, ReadFor read_for) {
    e.slot = bank.take(layer_of(e).size_class);
    if (!e.slot) {
        return false;
    }
    e.read_for  = read_for;
    e.load.slot = e.slot;
    e.ready.store(0, std::memory_order_relaxed);
    seats.come(e);
    return true;
}

void Residents::arrived(Expert & e) {
    pyorch_stats & counts = seats.counts(e.layer);
    e.abandoned           = false;
    layer_of(e).n_only_above -= e.above;
    ++counts.loads;
    counts.prefetch_loads += e.unasked(); // a layer that needed it meanwhile has counted it
    seats.arrive(e);
}

void Residents::drop(Expert & e) {
    Layer & l = layer_of(e);
    if (e.slot) {
        bank.give(e.slot);
        e.slot = {};
    }
    unstage(e.load);
    if (e.guess_of) {
        l.guessed.erase(std::find(l.guessed.begin(), l.guessed.end(), e.id));
        seats.counts(e.layer).prefetch_wasted += e.read_in_vain();
        e.guess_of = nullptr;
    }
    l.n_only_above += e.resident() && e.above;
    e.ready.store(0, std::memory_order_relaxed);
    e.read_for  = ReadFor::DEMAND;
    e.abandoned = false;
    seats.go(e);
}

void Residents::guess_for(Expert & e, const void * context) {
    e.guess_of = context;
    layer_of(e).guessed.push_back(e.id);
}

void Residents::give_parts(Load & load, uint32_t parts) {
    for (Part part : { PART_E, PART_SM }) {
        if ((parts & bit_of(part)) && load.parts[part]) {
            bank.give(load.parts[part]);
            load.parts[part] = {};
        }
    }
    load.in_memory &= ~parts;
}

void Residents::unstage(Load & load) {
    give_parts(load, ~load.in_memory);
    load.staged = false;
}

void Residents::set_keys(Victims & victims, int layer, int id) const {
    const Expert & e = expert(layer, id);
    if (!e.may_go()) {
        for (Purpose purpose : { FOR_DEMAND, FOR_ORDER, FOR_GUESS }) {
            victims.set(layer, id, purpose, Victims::NEVER);
        }
        return;
    }
    const bool   waits = e.read_ahead();
    const double key   = passes(e) ? Victims::SCANNED : e.guessed() ? Victims::GUESSED : values.value(layer, id);
    // An expert that goes first is never fresh. Otherwise guesses would take the memory of experts that are only full.
    const bool fresh = values.is_fresh(layer, id) && !passes(e);
    victims.set(layer, id, FOR_DEMAND, key);
    victims.set(layer, id, FOR_ORDER, waits ? Victims::NEVER : key);
    victims.set(layer, id, FOR_GUESS, waits || fresh ? Victims::NEVER : key);
}

} // namespace pyorch
