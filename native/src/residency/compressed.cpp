// Stored parts of compressed experts: memory for those on their way, and which of them stay (pools.h).

#include "residency/table.h"

#include <algorithm>
#include <cmath>

namespace pyorch {

// What came at once within so many tokens says how much may come at once.
static constexpr uint64_t WIDTH_TOKENS = 64;

// Bytes that can be taken for stored parts. The least that loads need is there whatever full experts still have.
uint64_t Table::stored_room() const {
    const auto left = [&](uint64_t limit) { return limit > bank->stored_taken() ? limit - bank->stored_taken() : 0; };
    const uint64_t matrices = std::min(bank->budget(), bank->matrices_taken());
    return std::min(left(pools.stored_limit()),
        std::max(left(bank->budget() - matrices), left(ModelMap::MIN_STAGED * map.parts_bytes())));
}

// What is read ahead leaves room for another: a layer that comes then need not wait for the end of a guess.
Staged Table::stage(Load & load) {
    const bool is_ahead = !load.stream && expert_of(load).in_use == 0 && !expert_of(load).pinned;
    const auto needed   = [&] { // the victim below may be this expert
        uint64_t bytes = is_ahead ? map.parts_bytes() : 0;
        for (Part part : { PART_E, PART_SM }) {
            bytes += load.there & bit_of(part) ? 0 : slot_bytes(map.layers[load.layer], part);
        }
        return bytes;
    };
    while (needed() > stored_room()) {
        // Full experts still have memory that is not theirs any more: the pools wait for it, loads do not.
        Expert * victim = bank->matrices_taken() > bank->matrices_budget() ? least_stored() : nullptr;
        if (!victim) {
            return Staged::LATER;
        }
        keep_parts(*victim, Form::ABSENT);
    }
    for (Part part : { PART_E, PART_SM }) {
        const int size_class = bank->size_class(load.layer, part);
        if ((load.there & bit_of(part)) || size_class < 0) {
            continue;
        }
        load.parts[part] = bank->take(size_class);
        if (!load.parts[part]) {
            give_parts(load, ~load.there);
            return Staged::NEVER;
        }
    }
    load.staged = true;
    if (!load.stream) {
        changed(expert_of(load)); // its pool cannot give up what it has of it now
    }
    return Staged::YES;
}

// Their slots go back; what lay there is not there any more.
void Table::give_parts(Load & load, uint32_t parts) {
    for (Part part : { PART_E, PART_SM }) {
        if ((parts & bit_of(part)) && load.parts[part]) {
            bank->give(load.parts[part]);
            load.parts[part] = {};
        }
    }
    load.there &= ~parts;
}

// A load is over, or is given up: what it did not bring in whole goes.
void Table::unstage(Load & load) {
    give_parts(load, ~load.there);
    load.staged = false;
}

static uint64_t bytes_of(const MoeLayer & layer, Form form) {
    uint64_t bytes = 0;
    for (Part part : { PART_E, PART_SM }) {
        bytes += parts_of(form) & bit_of(part) ? slot_bytes(layer, part) : 0;
    }
    return bytes;
}

// Of the stored parts that are there, those of a form stay, and are counted in its pool.
void Table::keep_parts(Expert & e, Form form) {
    const MoeLayer & layer = map.layers[e.layer()];
    pools.bytes(e.kept) -= bytes_of(layer, e.kept);
    give_parts(e.load, ~parts_of(form));
    e.kept = stored_form(e.load.there);
    pools.bytes(e.kept) += bytes_of(layer, e.kept);
    changed(e);
}

// All stored parts of an expert are there, or those that its pool has: its rank says what stays.
void Table::settle_parts(Expert & e) {
    const bool comes = e.read_ahead() && !e.in_use; // the use that it is for has not been counted
    keep_parts(e, e.pinned ? Form::FULL : pools.form_of(e.layer(), e.id(), comes));
    trim_pools();
}

// The least valuable expert of a pool that no load is at work with.
Expert * Table::least_stored(Form form) {
    compute_changed_keys();
    Expert * victim = nullptr;
    double   value  = 0;
    for (int i = 0; i < (int) layers.size(); ++i) {
        const Victims::Least least = pools.victims(form).least(i, FOR_DEMAND);
        if (least.expert >= 0 && (!victim || values.worth(i, least.key) < value)) {
            victim = &layers[i].experts[least.expert];
            value  = values.worth(i, least.key);
        }
    }
    return victim;
}

// The same of any pool, the last one first.
Expert * Table::least_stored() {
    for (const Form form : { Form::E_ONLY, Form::SM_ONLY, Form::COMPRESSED }) {
        if (Expert * victim = least_stored(form)) {
            return victim;
        }
    }
    return nullptr;
}

// Until no pool has more than its share, but for what loads are at work with: a load that still waits for memory must
// not keep others from theirs. What leaves a pool goes to the next one that takes a part of it: that costs no reading.
void Table::trim_pools() {
    for (const Form form : { Form::COMPRESSED, Form::SM_ONLY, Form::E_ONLY }) {
        while (pools.any() && pools.bytes(form) > pools.limit(form)) {
            Expert * victim = least_stored(form);
            if (!victim) {
                break;
            }
            keep_parts(*victim,
                form != Form::COMPRESSED           ? Form::ABSENT :
                    pools.limit(Form::SM_ONLY) > 0 ? Form::SM_ONLY :
                                                     Form::E_ONLY);
        }
    }
}

// Several sequences together compute with more experts of a layer than one, for which a plan is made.
void Table::widen(int layer, const Demand & demand) {
    if (!pools.any() || (demand.scans() && !demand.continues)) { // a prompt
        return;
    }
    const Layer & l = layers[layer];
    const auto    unheld =
        std::count_if(demand.experts.begin(), demand.experts.end(), [&](int id) { return !l.experts[id].pinned; });
    const uint64_t others = reserved_bytes - std::max(values.min(layer), l.n_pinned) * l.slot_bytes;
    width.next            = std::max(width.next, others + (l.n_pinned + (uint64_t) unheld) * l.slot_bytes);
    const bool ends       = values.now() >= width.begin + WIDTH_TOKENS * layers.size();
    if (width.next > width.most || (ends && width.next < width.most)) {
        width.most = width.next;
        divide_budget(bank->budget());
    }
    if (ends) {
        width = { width.most, 0, values.now() };
    }
}

// REQUIRES: the budget is enough for what is reserved
void Table::divide_budget(uint64_t bytes) {
    const uint64_t least_stored = ModelMap::MIN_STAGED * map.parts_bytes();
    const uint64_t needed       = needed_budget(reserved());
    const uint64_t at_once      = std::min(width.most, bytes - least_stored);
    pools.divide(bytes, std::max(needed, at_once), shares, at_once > needed ? at_once : 0);
    bank->set_budget(bytes, pools.stored_limit());
    trim_pools();
    keep_budget();
}

void Table::set_uses(int il, const double * uses, int n) {
    std::lock_guard<std::mutex> lock(mutex);
    const int                   layer = layer_index(il);
    if (n != layers[layer].n_expert) {
        throw Failure(
            PYORCH_INVALID, format("uses of %d experts were given, layer %d has %d", n, il, layers[layer].n_expert));
    }
    if (!std::all_of(uses, uses + n, [](double it) { return it >= 0 && std::isfinite(it); })) {
        throw Failure(PYORCH_INVALID, format("uses of experts of layer %d are no numbers from 0 on", il));
    }
    pools.begin_with(layer, uses, values.now());
}

void Table::set_pools(const PoolShares & wanted) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        shares = wanted;
        divide_budget(bank->budget());
    }
    space.notify_all();
    loads.wake();
}

} // namespace pyorch
