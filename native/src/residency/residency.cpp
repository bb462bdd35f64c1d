#include "residency/residency.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <chrono>
#include <cstring>
#include <sys/mman.h>

namespace pyorch {

// A batch this wide is a prompt: it touches most experts once, and says little about which ones
// decoding will need.
static constexpr int SCAN_TOKENS = 8;

// Large enough for a disk's full bandwidth, small enough that a demand does not wait long behind what is read ahead.
static constexpr uint64_t DEFAULT_READ_BYTES = 4u << 20;

static uint64_t clock_ns() {
    using namespace std::chrono;
    return (uint64_t) duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

ResidencyTable::ResidencyTable(const ModelMap & map, std::unique_ptr<Source> source, const pyorch_config & config) :
        map(map),
        source(std::move(source)),
        policy(make_policy((pyorch_policy) config.policy, (int) map.layers.size())),
        read_bytes((config.read_bytes ? config.read_bytes : DEFAULT_READ_BYTES) / PAGE * PAGE),
        pool(std::min(config.budget_bytes, map.slots_bytes())) {
    if (config.budget_bytes < map.floor_bytes()) {
        throw Failure(PYORCH_BUDGET, format("budget %s is below the floor of %s (all experts of one layer)",
            mebibytes(config.budget_bytes).c_str(), mebibytes(map.floor_bytes()).c_str()));
    }
    read_bytes = std::max(read_bytes, PAGE);

    layers.resize(map.layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
        Layer & layer = layers[i];
        layer.n_expert   = map.layers[i].n_expert;
        layer.max        = layer.n_expert;
        layer.slot_bytes = map.layers[i].slot_bytes();
        layer.experts    = std::make_unique<Expert[]>(layer.n_expert);
        for (int id = 0; id < layer.n_expert; ++id) {
            layer.experts[id].layer = (int) i;
            layer.experts[id].id    = id;
            layer.experts[id].usage.probability = 1.0f / layer.n_expert;
        }
        for (const auto & t : map.layers[i].tensors) {
            zeros_size = std::max(zeros_size, t.stride);
        }
    }
    if (zeros_size) {
        // Never written, so it is the system's one page of zeros however large it is.
        void * p = mmap(nullptr, zeros_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) {
            throw Failure(PYORCH_IO, format("cannot reserve %s: %s", mebibytes(zeros_size).c_str(), strerror(errno)));
        }
        zeros = (char *) p;
    }
}

ResidencyTable::~ResidencyTable() {
    for (auto & layer : layers) {
        for (int id = 0; id < layer.n_expert; ++id) {
            if (layer.experts[id].state != Expert::ABSENT) {
                drop(layer.experts[id]);
            }
        }
    }
    if (zeros) {
        munmap(zeros, zeros_size);
    }
}

int ResidencyTable::layer_index(int il) const {
    for (size_t i = 0; i < map.layers.size(); ++i) {
        if (map.layers[i].il == il) {
            return (int) i;
        }
    }
    throw Failure(PYORCH_INVALID, format("layer %d has no routed experts", il));
}

Expert & ResidencyTable::expert_at(int layer, int32_t id) {
    if (id < 0 || id >= layers[layer].n_expert) {
        throw Failure(PYORCH_INVALID, format("layer %d has experts 0 to %d, not %d", map.layers[layer].il, layers[layer].n_expert - 1, id));
    }
    return layers[layer].experts[id];
}

//
// holding
//

void ResidencyTable::hold(Expert & e) {
    if (e.in_use++ == 0) {
        ++n_in_use;
        if (!e.pinned) {
            held_bytes += layer_of(e).slot_bytes;
        }
    }
}

void ResidencyTable::unhold(Expert & e) {
    if (--e.in_use == 0) {
        --n_in_use;
        if (!e.pinned) {
            held_bytes -= layer_of(e).slot_bytes;
        }
    }
}

void ResidencyTable::acquire(Owner & owner, int layer, const std::vector<int> & ids, int n_tokens) {
    std::unique_lock<std::mutex> lock(mutex);

    // A decode that was aborted inside a layer never reached its release.
    bool ignored;
    release_held(owner, ignored);

    Layer & l = layers[layer];
    space.wait(lock, [&] {
        uint64_t more    = 0;
        bool     failing = false; // for an earlier decode, whose last read has not ended
        for (int id : ids) {
            const Expert & e = l.experts[id];
            more += e.in_use || e.pinned ? 0 : l.slot_bytes;
            failing |= e.in_use == 0 && (e.ready.load(std::memory_order_relaxed) & Expert::FAILED);
        }
        return !failing && held_bytes + more <= pool.budget;
    });

    const bool scan = n_tokens >= SCAN_TOKENS;
    ++now;
    ++totals.layer_passes;
    totals.tokens += n_tokens;

    std::vector<Expert *> absent;
    std::vector<Expert *> loading;
    for (int id : ids) {
        Expert & e = l.experts[id];
        hold(e);
        owner.held.push_back(&e);
        if (e.state == Expert::RESIDENT) {
            ++l.stats.hits;
        } else {
            ++l.stats.misses;
            (e.state == Expert::ABSENT ? absent : loading).push_back(&e);
        }
        if (e.read_ahead) {
            ++l.stats.prefetch_hits;
            l.stats.prefetch_late += e.state == Expert::LOADING;
            e.read_ahead = false;
        }
        if (!scan) {
            policy->used(e.usage, now);
            e.scanned = false;
        } else if (e.state == Expert::ABSENT) {
            e.scanned = true;
        }
    }

    passing    = layer;
    last_layer = std::max(last_layer, layer);
    settle_guesses(layer);

    auto still_absent = [&] {
        // Another context may have brought one in while this one waited.
        absent.erase(std::remove_if(absent.begin(), absent.end(), [](Expert * e) { return e->state != Expert::ABSENT; }), absent.end());
        return !absent.empty();
    };
    if (still_absent()) {
        const int over = l.n_loaded + (int) absent.size() - l.max;
        if (over > 0) {
            shrink_layer(layer, over);
        }
        // What cannot be taken now is held by another layer, or a reader is at it: both end soon.
        while (still_absent() && !make_room(absent.size() * l.slot_bytes, layer, true)) {
            if (waiter) {
                lock.unlock();
                waiter();
                lock.lock();
            } else {
                space.wait(lock);
            }
        }
    }
    const size_t queued = demand.size();
    take_over_ahead(loading);
    for (Expert * e : absent) {
        if (!start_load(*e, demand)) {
            error = format("out of memory for expert %d of layer %d", e->id, map.layers[layer].il);
            e->ready.store(Expert::FAILED, std::memory_order_release);
        }
    }
    std::stable_sort(demand.begin() + queued, demand.end(), [](const ReadRequest & a, const ReadRequest & b) {
        return a.role != b.role ? a.role < b.role : a.expert->id < b.expert->id;
    });

    // A prompt needs nearly all of the next layer too, and this layer's compute is the time to read it.
    if (scan && (int) ids.size() * 4 >= l.n_expert * 3) {
        want_layer_ahead(layer + 1 < (int) layers.size() ? layer + 1 : -1);
    }
    lock.unlock();
    work.notify_all();
}

void ResidencyTable::release_held(Owner & owner, bool & failed) {
    failed = false;
    for (Expert * e : owner.held) {
        unhold(*e);
        if (e->ready.load(std::memory_order_relaxed) & Expert::FAILED) {
            failed = true;
            if (e->in_use == 0 && e->pending_total() == 0) {
                drop(*e);
            }
        }
    }
    owner.held.clear();
}

bool ResidencyTable::release(Owner & owner) {
    bool failed;
    {
        std::lock_guard<std::mutex> lock(mutex);
        release_held(owner, failed);
        totals.failures += failed;
    }
    space.notify_all();
    work.notify_all();
    return !failed;
}

void ResidencyTable::resident(int layer, std::vector<uint8_t> & mask) {
    std::lock_guard<std::mutex> lock(mutex);
    const Layer & l = layers[layer];
    mask.resize(l.n_expert);
    for (int id = 0; id < l.n_expert; ++id) {
        mask[id] = l.experts[id].state == Expert::RESIDENT;
    }
}

const char * ResidencyTable::address(int layer, int expert, int role, bool wait) {
    Expert &       e   = layers[layer].experts[expert];
    const uint32_t bit = 1u << role;

    uint32_t ready = e.ready.load(std::memory_order_acquire);
    if (ready & bit) {
        return e.addr[role];
    }
    if (!wait && !(ready & Expert::FAILED)) {
        return nullptr;
    }
    std::unique_lock<std::mutex> lock(mutex);
    if (n_waiting++ == 0) {
        wait_begin = clock_ns();
    }
    arrived.wait(lock, [&] {
        ready = e.ready.load(std::memory_order_acquire);
        return (ready & (bit | Expert::FAILED)) || e.state == Expert::ABSENT;
    });
    if (--n_waiting == 0) {
        totals.stall_ns += clock_ns() - wait_begin;
    }
    return ready & bit ? e.addr[role] : zeros;
}

//
// memory
//

void ResidencyTable::drop(Expert & e) {
    const MoeLayer & l = map.layers[e.layer];
    for (size_t r = 0; r < l.tensors.size(); ++r) {
        if (e.block[r]) {
            pool.free(e.block[r], l.tensors[r].block_bytes());
            e.block[r] = nullptr;
        }
    }
    if (e.state != Expert::ABSENT) {
        --layer_of(e).n_loaded;
    }
    e.ready.store(0, std::memory_order_relaxed);
    e.state      = Expert::ABSENT;
    e.read_ahead = false;
    n_predicted -= e.predicted;
    e.predicted  = false;
    e.scanned    = false;
}

// Evicts until so many bytes can be allocated; layer is the one that wants them. What was read ahead and
// not used yet goes only for demand, what is spared not at all. False if what is left is in use: the caller waits and
// tries again.
bool ResidencyTable::make_room(uint64_t bytes, int layer, bool for_demand, const Spared & spared) {
    if (pool.available() >= bytes) {
        return true;
    }

    struct Candidate {
        int      tier;
        double   value;
        Expert * expert;
        bool operator<(const Candidate & o) const { return tier != o.tier ? tier > o.tier : value > o.value; } // a heap of the lowest
    };
    std::vector<Candidate> candidates;
    const int n = (int) layers.size();
    for (auto & l : layers) {
        if (l.n_loaded <= l.min) {
            continue;
        }
        for (int id = 0; id < l.n_expert; ++id) {
            Expert & e = l.experts[id];
            if (e.in_use || e.pinned || e.usage.last_use > spared.used_after || e.usage.probability > spared.more_likely_than) {
                continue;
            }
            if (e.state == Expert::LOADING) {
                if (for_demand && e.in_flight == 0) {
                    candidates.push_back({ 2, 0, &e });
                }
            } else if (e.state != Expert::RESIDENT || (e.read_ahead && !for_demand)) {
                continue;
            } else if (e.scanned) {
                // Layers are passed in a cycle: the one that was passed last is needed last.
                candidates.push_back({ 0, -(double) ((e.layer - layer + n - 1) % n), &e });
            } else {
                // What is there on a guess is for a layer that has not come yet.
                candidates.push_back({ 1, e.predicted ? INFINITY : policy->value(e.usage, now), &e });
            }
        }
    }
    std::make_heap(candidates.begin(), candidates.end());
    while (pool.available() < bytes && !candidates.empty()) {
        std::pop_heap(candidates.begin(), candidates.end());
        Expert & e = *candidates.back().expert;
        candidates.pop_back();
        Layer & l = layer_of(e);
        if (l.n_loaded <= l.min) {
            continue;
        }
        if (e.state == Expert::LOADING) {
            unqueue(e);
            drop(e);
        } else {
            ++l.stats.evictions;
            drop(e);
        }
    }
    return pool.available() >= bytes;
}

// Evicts n experts of one layer, the least valuable first, as far as it can.
void ResidencyTable::shrink_layer(int layer, int n) {
    Layer & l = layers[layer];
    std::vector<std::pair<double, Expert *>> candidates;
    for (int id = 0; id < l.n_expert; ++id) {
        Expert & e = l.experts[id];
        if (e.state == Expert::RESIDENT && !e.in_use && !e.pinned) {
            candidates.push_back({ e.scanned ? -1.0 : policy->value(e.usage, now), &e });
        }
    }
    std::sort(candidates.begin(), candidates.end());
    for (int i = 0; i < n && i < (int) candidates.size(); ++i) {
        ++l.stats.evictions;
        drop(*candidates[i].second);
    }
}

} // namespace pyorch
