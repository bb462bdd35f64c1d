// What can be seen of the table.

#include "residency/table.h"

namespace pyorch {

void Table::get_residency(int il, uint8_t * mask, int n) {
    std::lock_guard<std::mutex> lock(mutex);
    Layer & l = layers[layer_index(il)];
    if (n != l.n_expert) {
        throw Failure(PYORCH_INVALID, format("layer %d has %d experts, the mask %d", il, l.n_expert, n));
    }
    for (int id = 0; id < n; ++id) {
        const Expert & e = l.experts[id];
        mask[id] = (e.resident() ? PYORCH_RESIDENT : 0) | (e.loading() ? PYORCH_LOADING : 0) |
                   (e.pinned ? PYORCH_PINNED : 0) | (e.in_use ? PYORCH_IN_USE : 0);
    }
}

void Table::get_stats(int il, pyorch_stats & out) {
    std::lock_guard<std::mutex> lock(mutex);
    const int only = il < 0 ? -1 : layer_index(il);
    out = only < 0 ? totals : pyorch_stats {};
    out.read_ns = only < 0 ? loads.read_ns() : 0;
    if (only < 0) {
        out.decoded_bytes = loads.bytes_decoded();
        out.decode_ns     = loads.decode_ns();
        for (const Form form : { Form::COMPRESSED, Form::SM_ONLY, Form::E_ONLY }) {
            out.stored_bytes += pools.bytes(form);
        }
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        if (only >= 0 && (int) i != only) {
            continue;
        }
        const Layer & l = layers[i];
        out.hits           += l.stats.hits;
        out.misses         += l.stats.misses;
        out.compressed_hits += l.stats.compressed_hits;
        out.sm_hits         += l.stats.sm_hits;
        out.e_hits          += l.stats.e_hits;
        out.loads          += l.stats.loads;
        out.prefetch_loads += l.stats.prefetch_loads;
        out.prefetch_hits  += l.stats.prefetch_hits;
        out.prefetch_late  += l.stats.prefetch_late;
        out.prefetch_wasted += l.stats.prefetch_wasted;
        out.evictions      += l.stats.evictions;
        out.bytes_read     += loads.bytes_read((int) i);
        out.resident_experts += l.n_resident;
        out.resident_bytes   += l.n_resident * l.slot_bytes;
    }
    out.used_bytes   = bank->used();
    out.peak_bytes   = bank->peak();
    out.budget_bytes = bank->budget();
}

void Table::reset_stats() {
    std::lock_guard<std::mutex> lock(mutex);
    totals = {};
    bank->reset_peak();
    loads.reset_stats();
    for (auto & l : layers) {
        l.stats = {};
    }
}

void Table::wait_idle() {
    std::unique_lock<std::mutex> lock(mutex);
    loads.wake();
    idle.wait(lock, [&] { return is_idle() || loads.was_stopped() || !loads.has_reader(); });
}

std::string Table::last_error() {
    std::lock_guard<std::mutex> lock(mutex);
    return error;
}

} // namespace pyorch
