// What others than the running layers ask of the table: prefetch, pins, limits, budget, policy.

#include "residency/table.h"

#include <algorithm>

namespace pyorch {

Expert & Table::expert_at(int layer, int32_t id) {
    if (id < 0 || id >= layers[layer].n_expert) {
        throw Failure(PYORCH_INVALID,
            format("layer %d has experts 0 to %d, not %d", map.layers[layer].il, layers[layer].n_expert - 1, id));
    }
    return layers[layer].experts[id];
}

// Changes the named experts of a layer, or none of them if one does not exist.
template <typename Change>
void Table::for_each(int il, const int32_t * experts, int n, Change change) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        const int                   layer = layer_index(il);
        for (int i = 0; i < n; ++i) {
            expert_at(layer, experts[i]);
        }
        for (int i = 0; i < n; ++i) {
            change(layers[layer], layers[layer].experts[experts[i]]);
        }
    }
    space.notify_all();
    loads.wake();
}

void Table::prefetch(int il, const int32_t * experts, int n) {
    for_each(il, experts, n, [&](Layer &, Expert & e) {
        e.wanted(); // a guess that was given up is an order now
        if (e.absent()) {
            // What was asked for by name counts as a use now, else it would be the next to go.
            used(e);
            ordered.push_back(&e);
        }
    });
}

// Experts of each layer that eviction cannot take.
std::vector<int> Table::reserved() const {
    std::vector<int> n;
    for (int layer = 0; layer < (int) layers.size(); ++layer) {
        n.push_back(std::max(values.min(layer), layers[layer].n_pinned));
    }
    return n;
}

void Table::reserve() {
    const std::vector<int> n = reserved();
    reserved_bytes           = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
        reserved_bytes += n[i] * layers[i].slot_bytes;
    }
}

// The budget that lets every layer run, whole or through its window, beside what is reserved.
uint64_t Table::needed_budget(const std::vector<int> & reserved) const {
    uint64_t all  = 0;
    uint64_t most = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
        all += reserved[i] * layers[i].slot_bytes;
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        most = std::max(most, all + std::min(window((int) i), layers[i].n_expert - reserved[i]) * layers[i].slot_bytes);
    }
    return most;
}

// What full experts can have of the budget: pools give way to them, but for the least through which experts come.
uint64_t Table::most_for_full() const { return bank->budget() - ModelMap::MIN_STAGED * map.parts_bytes(); }

void Table::pin(int il, const int32_t * experts, int n) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        const int                   layer = layer_index(il);
        std::vector<bool>           also(layers[layer].n_expert);
        for (int i = 0; i < n; ++i) {
            const Expert & e = expert_at(layer, experts[i]);
            also[e.id()]     = !e.pinned;
        }
        std::vector<int> n_reserved = reserved();
        n_reserved[layer] =
            std::max(n_reserved[layer], layers[layer].n_pinned + (int) std::count(also.begin(), also.end(), true));
        const uint64_t most = needed_budget(n_reserved);
        if (most > most_for_full()) {
            throw Failure(PYORCH_BUDGET,
                format("pinning %d experts of layer %d needs a budget of %s, it is %s", n, il, mebibytes(most).c_str(),
                    mebibytes(most_for_full()).c_str()));
        }
        for (int i = n - 1; i >= 0; --i) {
            Expert & e = layers[layer].experts[experts[i]];
            if (e.pinned) {
                continue;
            }
            e.pinned = true;
            e.wanted();
            ++layers[layer].n_pinned;
            e.not_scanned();
            changed(e);
            if (e.absent()) {
                ordered.push_front(&e);
            }
        }
        reserve();
        divide_budget(bank->budget());
    }
    space.notify_all();
    loads.wake();
}

void Table::offer(int il, int expert, const void * bytes, uint64_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    const int                   layer = layer_index(il);
    const MoeLayer &            of    = map.layers[layer];
    const Expert &              e     = expert_at(layer, expert);
    uint64_t                    all   = 0;
    for (int role = 0; role < (int) of.tensors.size(); ++role) {
        all += in_model(of, role, expert).bytes;
    }
    if (size != all) {
        throw Failure(PYORCH_INVALID,
            format("an expert of layer %d has %llu bytes, not %llu", il, (unsigned long long) all,
                (unsigned long long) size));
    }
    if (e.absent() && !of.pack) {
        loads.offer(layer, expert, std::vector<char>((const char *) bytes, (const char *) bytes + size));
    }
}

void Table::unpin(int il, const int32_t * experts, int n) {
    for_each(il, experts, n, [&](Layer & l, Expert & e) {
        if (e.pinned) {
            e.pinned = false;
            --l.n_pinned;
            reserve();
            used(e);
        }
    });
    {
        std::lock_guard<std::mutex> lock(mutex);
        divide_budget(bank->budget());
    }
    loads.wake(); // pools may have memory again
}

void Table::evict(int il, const int32_t * experts, int n) {
    for_each(il, experts, n, [&](Layer & l, Expert & e) {
        if (e.resident() && !e.in_use && !e.pinned) {
            ++l.stats.evictions;
            drop(e);
        }
        if (e.kept != Form::ABSENT && !e.load.staged) {
            keep_parts(e, Form::ABSENT);
        }
    });
}

void Table::set_budget(uint64_t bytes) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        bytes               = std::min(bytes, map.slots_bytes());
        const uint64_t most = needed_budget(reserved()) + ModelMap::MIN_STAGED * map.parts_bytes();
        if (bytes < most) {
            throw Failure(PYORCH_BUDGET,
                format("budget %s is below the %s that the largest layer needs beside what is reserved",
                    mebibytes(bytes).c_str(), mebibytes(most).c_str()));
        }
        divide_budget(bytes);
    }
    space.notify_all();
    loads.wake();
}

void Table::set_policy(pyorch_policy which) {
    std::lock_guard<std::mutex> learning_lock(learning);
    std::lock_guard<std::mutex> lock(mutex);
    values.set_policy(which);
    make_learner_of();
}

void Table::set_layer_limits(int il, int min, int max) {
    std::unique_lock<std::mutex> lock(mutex);
    const int                    layer    = layer_index(il);
    const int                    n_expert = layers[layer].n_expert;
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
    reserve();
    divide_budget(bank->budget());
    shrink_layer(layer, order.n(layer) - max);
    lock.unlock();
    space.notify_all();
    loads.wake();
}

} // namespace pyorch
