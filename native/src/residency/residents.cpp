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

Residents::Residents(const ModelMap & map, Bank & bank, Values & values, EvictionOrder & order) :
        map(map), bank(bank), values(values), order(order), layers(map.layers.size()) {
    for (int i = 0; i < n_layers(); ++i) {
        Layer & layer    = layers[i];
        layer.n_expert   = map.layers[i].n_expert;
        layer.size_class = bank.size_class(i, PART_MATRICES);
        layer.slot_bytes = map.layers[i].slot_bytes();
        layer.read_bytes = mean_read_bytes(map.layers[i]);
        layer.experts    = std::make_unique<Expert[]>(layer.n_expert);
        layer.is_resident.resize(layer.n_expert);
        for (int id = 0; id < layer.n_expert; ++id) {
            layer.experts[id].load.layer  = i;
            layer.experts[id].load.expert = id;
            layer.experts[id].elsewhere   = map.layers[i].lacks(id);
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
    e.pinned = true;
    e.wanted();
    e.not_scanned();
    ++layer_of(e).n_pinned;
    changed(e);
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
    changed(e);
}

bool Residents::start_load(Expert & e, ReadFor read_for) {
    e.slot = bank.take(layer_of(e).size_class);
    if (!e.slot) {
        return false;
    }
    e.state     = State::LOADING;
    e.read_for  = read_for;
    e.load.slot = e.slot;
    e.ready.store(0, std::memory_order_relaxed);
    values.came(e.layer(), e.id());
    order.came(e.layer());
    return true;
}

void Residents::arrived(Expert & e) {
    Layer & l             = layer_of(e);
    e.state               = State::RESIDENT;
    l.is_resident[e.id()] = 1;
    ++l.n_resident;
    l.n_only_above -= e.above;
    ++l.stats.loads;
    l.stats.prefetch_loads += e.unasked(); // a layer that came to need it meanwhile has counted it
    changed(e);
}

void Residents::drop(Expert & e) {
    Layer & l = layer_of(e);
    if (e.slot) {
        bank.give(e.slot);
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
    l.n_only_above += e.resident() && e.above;
    l.is_resident[e.id()] = 0;
    e.ready.store(0, std::memory_order_relaxed);
    e.state    = State::ABSENT;
    e.read_for = ReadFor::DEMAND;
    changed(e);
}

void Residents::guess_for(Expert & e, const void * context) {
    e.guessed_for = context;
    layer_of(e).guessed.push_back(e.id());
}

void Residents::give_parts(Load & load, uint32_t parts) {
    for (Part part : { PART_E, PART_SM }) {
        if ((parts & bit_of(part)) && load.parts[part]) {
            bank.give(load.parts[part]);
            load.parts[part] = {};
        }
    }
    load.there &= ~parts;
}

void Residents::unstage(Load & load) {
    give_parts(load, ~load.there);
    load.staged = false;
}

void Residents::set_keys(Victims & victims, int layer, int id) const {
    const Expert & e = expert(layer, id);
    if (!layers[layer].is_resident[id] || e.in_use || e.pinned) {
        for (Purpose purpose : { FOR_DEMAND, FOR_ORDER, FOR_GUESS }) {
            victims.set(layer, id, purpose, Victims::NEVER);
        }
        return;
    }
    const bool   waits = e.read_ahead();
    const double key   = passes(e) ? Victims::SCANNED : e.guessed() ? Victims::GUESSED : values.value(layer, id);
    // What passes has to be read no more than before. Guesses would else take the memory of experts that are full only.
    const bool fresh = values.is_fresh(layer, id) && !passes(e);
    victims.set(layer, id, FOR_DEMAND, key);
    victims.set(layer, id, FOR_ORDER, waits ? Victims::NEVER : key);
    victims.set(layer, id, FOR_GUESS, waits || fresh ? Victims::NEVER : key);
}

} // namespace pyorch
