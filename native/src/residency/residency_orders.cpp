// What others than the running layers ask of the table: prefetch, pins, limits, budget, statistics.

#include "residency/residency.h"

#include <algorithm>

namespace pyorch {

// Changes the named experts of a layer, or none of them if one does not exist.
template <typename Change>
void ResidencyTable::for_each(int il, const int32_t * experts, int n, Change change) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        const int layer = layer_index(il);
        for (int i = 0; i < n; ++i) {
            expert_at(layer, experts[i]);
        }
        for (int i = 0; i < n; ++i) {
            change(layers[layer], layers[layer].experts[experts[i]]);
        }
    }
    space.notify_all();
    work.notify_all();
}

void ResidencyTable::prefetch(int il, const int32_t * experts, int n) {
    for_each(il, experts, n, [&](Layer &, Expert & e) {
        if (e.state == Expert::ABSENT) {
            // What was asked for by name counts as a use now, else it would be the next to go.
            policy->used(e.usage, now);
            e.scanned = false;
            ahead_wanted.push_back(&e);
        }
    });
}

// Experts of each layer that eviction cannot take.
std::vector<int> ResidencyTable::reserved() const {
    std::vector<int> n;
    for (const auto & l : layers) {
        const int pinned = (int) std::count_if(&l.experts[0], &l.experts[l.n_expert], [](const Expert & e) { return e.pinned; });
        n.push_back(std::max(l.min, pinned));
    }
    return n;
}

// The budget that lets every layer run as a whole beside what is reserved in the others.
uint64_t ResidencyTable::needed_budget(const std::vector<int> & reserved) const {
    uint64_t all  = 0;
    uint64_t most = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
        all += reserved[i] * layers[i].slot_bytes;
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        most = std::max(most, all + (layers[i].n_expert - reserved[i]) * layers[i].slot_bytes);
    }
    return most;
}

void ResidencyTable::pin(int il, const int32_t * experts, int n) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        const int layer = layer_index(il);
        std::vector<bool> also(layers[layer].n_expert);
        for (int i = 0; i < n; ++i) {
            expert_at(layer, experts[i]);
            also[experts[i]] = true;
        }
        for (int id = 0; id < layers[layer].n_expert; ++id) {
            also[id] = also[id] || layers[layer].experts[id].pinned;
        }
        std::vector<int> n_reserved = reserved();
        n_reserved[layer] = std::max(n_reserved[layer], (int) std::count(also.begin(), also.end(), true));
        const uint64_t most = needed_budget(n_reserved);
        if (most > pool.budget) {
            throw Failure(PYORCH_BUDGET, format("pinning %d experts of layer %d needs a budget of %s, it is %s", n, il,
                mebibytes(most).c_str(), mebibytes(pool.budget).c_str()));
        }
        for (int i = n - 1; i >= 0; --i) {
            Expert & e = layers[layer].experts[experts[i]];
            if (e.pinned) {
                continue;
            }
            e.pinned  = true;
            e.scanned = false;
            if (!e.in_use) {
                held_bytes += layers[layer].slot_bytes;
            }
            if (e.state == Expert::ABSENT) {
                ahead_wanted.push_front(&e);
            }
        }
    }
    work.notify_all();
}

void ResidencyTable::unpin(int il, const int32_t * experts, int n) {
    for_each(il, experts, n, [&](Layer & l, Expert & e) {
        if (e.pinned) {
            e.pinned = false;
            if (!e.in_use) {
                held_bytes -= l.slot_bytes;
            }
            policy->used(e.usage, now);
        }
    });
}

void ResidencyTable::evict(int il, const int32_t * experts, int n) {
    for_each(il, experts, n, [&](Layer & l, Expert & e) {
        if (e.state == Expert::RESIDENT && !e.in_use && !e.pinned) {
            ++l.stats.evictions;
            drop(e);
        }
    });
}

void ResidencyTable::set_budget(uint64_t bytes) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        bytes = std::min(bytes, map.slots_bytes());
        const uint64_t most = needed_budget(reserved());
        if (bytes < most) {
            throw Failure(PYORCH_BUDGET, format("budget %s is below the %s that the largest layer needs beside what is reserved",
                mebibytes(bytes).c_str(), mebibytes(most).c_str()));
        }
        if (bytes < pool.budget) {
            make_room(pool.budget - bytes, 0, true);
        }
        // What a running layer holds above the new budget is given back when the layer ends.
        pool.set_budget(bytes);
    }
    space.notify_all();
    work.notify_all();
}

void ResidencyTable::set_policy(pyorch_policy which) {
    std::lock_guard<std::mutex> lock(mutex);
    policy = make_policy(which, (int) layers.size());
}

void ResidencyTable::set_layer_limits(int il, int min, int max) {
    std::lock_guard<std::mutex> lock(mutex);
    Layer & l = layers[layer_index(il)];
    if (min < 0 || max > l.n_expert || min > max) {
        throw Failure(PYORCH_INVALID, format("limits of layer %d must be 0 <= min <= max <= %d, not %d and %d", il, l.n_expert, min, max));
    }
    std::vector<int> n_reserved = reserved();
    n_reserved[&l - layers.data()] = std::max(n_reserved[&l - layers.data()], min);
    const uint64_t most = needed_budget(n_reserved);
    if (most > pool.budget) {
        throw Failure(PYORCH_BUDGET, format("a minimum of %d experts in layer %d needs a budget of %s, it is %s", min, il,
            mebibytes(most).c_str(), mebibytes(pool.budget).c_str()));
    }
    l.min = min;
    l.max = max;
    if (l.n_loaded > max) {
        shrink_layer((int) (&l - layers.data()), l.n_loaded - max);
    }
}

void ResidencyTable::get_residency(int il, uint8_t * mask, int n) {
    std::lock_guard<std::mutex> lock(mutex);
    Layer & l = layers[layer_index(il)];
    if (n != l.n_expert) {
        throw Failure(PYORCH_INVALID, format("layer %d has %d experts, the mask %d", il, l.n_expert, n));
    }
    for (int id = 0; id < n; ++id) {
        const Expert & e = l.experts[id];
        mask[id] = (e.state == Expert::RESIDENT ? PYORCH_RESIDENT : 0) | (e.state == Expert::LOADING ? PYORCH_LOADING : 0) |
                   (e.pinned ? PYORCH_PINNED : 0) | (e.in_use ? PYORCH_IN_USE : 0);
    }
}

void ResidencyTable::get_stats(int il, pyorch_stats & out) {
    std::lock_guard<std::mutex> lock(mutex);
    const int only = il < 0 ? -1 : layer_index(il);
    out = only < 0 ? totals : pyorch_stats {};
    for (size_t i = 0; i < layers.size(); ++i) {
        if (only >= 0 && (int) i != only) {
            continue;
        }
        const Layer & l = layers[i];
        out.hits           += l.stats.hits;
        out.misses         += l.stats.misses;
        out.loads          += l.stats.loads;
        out.prefetch_loads += l.stats.prefetch_loads;
        out.prefetch_hits  += l.stats.prefetch_hits;
        out.prefetch_late  += l.stats.prefetch_late;
        out.prefetch_wasted += l.stats.prefetch_wasted;
        out.evictions      += l.stats.evictions;
        out.bytes_read     += l.stats.bytes_read;
        for (int id = 0; id < l.n_expert; ++id) {
            if (l.experts[id].state == Expert::RESIDENT) {
                ++out.resident_experts;
                out.resident_bytes += l.slot_bytes;
            }
        }
    }
    out.used_bytes   = pool.used + pool.kept;
    out.peak_bytes   = pool.peak;
    out.budget_bytes = pool.budget;
}

void ResidencyTable::reset_stats() {
    std::lock_guard<std::mutex> lock(mutex);
    totals    = {};
    pool.peak = pool.used + pool.kept;
    for (auto & l : layers) {
        l.stats = {};
    }
}

void ResidencyTable::wait_idle() {
    std::unique_lock<std::mutex> lock(mutex);
    work.notify_all();
    idle.wait(lock, [&] { return is_idle() || stopped; });
}

std::string ResidencyTable::last_error() {
    std::lock_guard<std::mutex> lock(mutex);
    return error;
}

} // namespace pyorch
