// The table's residency, snapshot and counts, for its users.

#include "residency/table.h"

#include <algorithm>

namespace pyorch {

namespace {

uint8_t flags_of(const Expert & e) {
    return (e.resident() ? PYORCH_RESIDENT : 0) | (e.loading() ? PYORCH_LOADING : 0) | (e.pinned ? PYORCH_PINNED : 0) |
        (e.holds ? PYORCH_IN_USE : 0);
}

} // namespace

void Table::get_residency(int il, uint8_t * mask, int n) {
    MutexLock    lock(mutex);
    const auto & l = residents[layer_index(il)];
    if (n != l.n_expert) {
        throw Failure(PYORCH_INVALID, format("layer %d has %d experts, the mask %d", il, l.n_expert, n));
    }
    for (int id = 0; id < n; ++id) {
        mask[id] = flags_of(l.experts[id]);
    }
}

void Table::get_snapshot(pyorch_snapshot & out) {
    MutexLock lock(mutex);
    const int n_layers = residents.n_layers();
    int       widest   = 0;
    for (int layer = 0; layer < n_layers; ++layer) {
        widest = std::max(widest, residents[layer].n_expert);
    }
    out.stats = {};
    count(-1, out.stats);
    if (out.flags) {
        if (out.n_layers != n_layers || out.n_expert != widest) {
            throw Failure(PYORCH_INVALID,
                format("the model has %d layers of up to %d experts, the snapshot %d of %d", n_layers, widest,
                    out.n_layers, out.n_expert));
        }
        for (int i = 0; i < n_layers; ++i) {
            const auto & l = residents[i];
            for (int id = 0; id < widest; ++id) {
                out.flags[i * widest + id] = id < l.n_expert ? flags_of(l.experts[id]) : 0;
                out.uses[i * widest + id]  = id < l.n_expert ? l.experts[id].uses : 0;
            }
            out.layers[i] = {};
            count(i, out.layers[i]);
        }
    }
    out.n_layers = n_layers;
    out.n_expert = widest;
}

void Table::add_stats(int layer, pyorch_stats & stats) {
    MutexLock lock(mutex);
    count(layer, stats);
}

// only: a layer; -1: all layers.
void Table::count(int only, pyorch_stats & out) {
    if (only < 0) {
        const Loader::Counts of_loads = loads.counts(mutex.locked());
        add_counts(out, totals);
        out.read_ns += of_loads.read_ns;
        out.decoded_bytes += of_loads.bytes_decoded;
        out.decode_ns += loads.decode_ns();
        for (const Form form : { Form::COMPRESSED, Form::SM_ONLY, Form::E_ONLY }) {
            out.stored_bytes += stored.pools.bytes(form);
        }
    }
    for (int i = 0; i < residents.n_layers(); ++i) {
        if (only >= 0 && i != only) {
            continue;
        }
        add_counts(out, residents.seats.counts(i));
        out.bytes_read += loads.bytes_read(mutex.locked(), i);
        out.resident_experts += residents.seats.n_resident(i);
        out.resident_bytes += residents.seats.n_resident(i) * residents[i].slot_bytes;
    }
    out.used_bytes += bank->used();
    out.peak_bytes += bank->peak();
    out.budget_bytes += bank->budget();
}

void Table::reset_stats() {
    MutexLock lock(mutex);
    totals = {};
    bank->reset_peak();
    loads.reset_stats(mutex.locked());
    residents.seats.reset_counts();
    for (int layer = 0; layer < residents.n_layers(); ++layer) {
        for (int id = 0; id < residents[layer].n_expert; ++id) {
            residents.expert(layer, id).uses = 0;
        }
    }
}

void Table::wait_idle() {
    MutexLock lock(mutex);
    loads.wake();
    while (!is_idle() && !loads.was_stopped(mutex.locked()) && loads.has_reader(mutex.locked())) {
        if (!loads.decode_next(mutex.locked())) {
            idle.wait(mutex);
        }
    }
}

} // namespace pyorch
