#include "residency/stored_parts.h"

#include <algorithm>

namespace pyorch {

// Bytes that are free for stored parts. The least that loads need is free whatever full experts still have.
uint64_t StoredParts::room() const {
    const auto     left = [&](uint64_t limit) { return limit > bank.stored_taken() ? limit - bank.stored_taken() : 0; };
    const uint64_t matrices = std::min(bank.budget(), bank.matrices_taken());
    return std::min(left(pools.stored_limit()), std::max(left(bank.budget() - matrices), left(least())));
}

// A load ahead leaves room for another one, so that a layer that comes then need not wait for the end of a guess.
Staged StoredParts::stage(Load & load) {
    const bool is_ahead = !load.stream && residents.expert_of(load).holds == 0 && !residents.expert_of(load).pinned;
    const auto needed   = [&] { // the victim below may be this expert
        uint64_t bytes = is_ahead ? map.parts_bytes() : 0;
        for (Part part : { PART_E, PART_SM }) {
            bytes += load.in_memory & bit_of(part) ? 0 : slot_bytes(map.layers[load.layer], part);
        }
        return bytes;
    };
    while (needed() > room()) {
        // Full experts still have more than their budget: the pools wait for that memory, loads do not.
        Expert * victim = bank.matrices_taken() > bank.matrices_budget() ? least_valuable() : nullptr;
        if (!victim) {
            return Staged::LATER;
        }
        keep(*victim, Form::ABSENT);
    }
    for (Part part : { PART_E, PART_SM }) {
        const int size_class = bank.size_class(load.layer, part);
        if ((load.in_memory & bit_of(part)) || size_class < 0) {
            continue;
        }
        load.parts[part] = bank.take(size_class);
        if (!load.parts[part]) {
            residents.give_parts(load, ~load.in_memory);
            return Staged::NEVER;
        }
    }
    load.staged = true;
    if (!load.stream) {
        residents.seats.changed(residents.expert_of(load)); // its pool must keep its parts now
    }
    return Staged::YES;
}

void StoredParts::keep(Expert & e, Form form) {
    const MoeLayer & layer = map.layers[e.layer];
    pools.bytes(e.kept) -= stored_bytes(layer, e.kept);
    residents.give_parts(e.load, ~parts_of(form));
    e.kept = stored_form(e.load.in_memory);
    pools.bytes(e.kept) += stored_bytes(layer, e.kept);
    residents.seats.changed(e);
}

void StoredParts::settle(Expert & e) {
    const bool comes = e.read_ahead() && !e.holds; // its use has not been counted
    keep(e, e.pinned ? Form::FULL : pools.form_of(e.layer, e.id, comes));
    trim();
}

// The least valuable expert of a pool, without running loads.
Expert * StoredParts::least_valuable(Form form) {
    order.update();
    Expert * victim = nullptr;
    double   value  = 0;
    for (int i = 0; i < residents.n_layers(); ++i) {
        const Victims::Least least = pools.victims(form).least(i, FOR_DEMAND);
        if (least.expert >= 0 && (!victim || values.worth(i, least.key) < value)) {
            victim = &residents.expert(i, least.expert);
            value  = values.worth(i, least.key);
        }
    }
    return victim;
}

// The least valuable expert of all pools; the last pool first.
Expert * StoredParts::least_valuable() {
    for (const Form form : { Form::E_ONLY, Form::SM_ONLY, Form::COMPRESSED }) {
        if (Expert * victim = least_valuable(form)) {
            return victim;
        }
    }
    return nullptr;
}

// An expert that leaves a pool goes to the next pool that takes some of its parts: that needs no read.
void StoredParts::trim() {
    for (const Form form : { Form::COMPRESSED, Form::SM_ONLY, Form::E_ONLY }) {
        while (pools.any() && pools.bytes(form) > pools.limit(form)) {
            Expert * victim = least_valuable(form);
            if (!victim) {
                break;
            }
            keep(*victim,
                form != Form::COMPRESSED           ? Form::ABSENT :
                    pools.limit(Form::SM_ONLY) > 0 ? Form::SM_ONLY :
                                                     Form::E_ONLY);
        }
    }
}

void StoredParts::set_keys(const Expert & e) {
    for (const Form form : { Form::COMPRESSED, Form::SM_ONLY, Form::E_ONLY }) {
        const bool may_go = e.kept == form && !e.load.staged;
        // An expert that was read ahead is worth little until its use: it would be evicted before, and read again.
        const double worth = e.read_ahead() ? Victims::GUESSED : values.value(e.layer, e.id);
        pools.victims(form).set(e.layer, e.id, FOR_DEMAND, may_go ? worth : Victims::NEVER);
    }
}

} // namespace pyorch
