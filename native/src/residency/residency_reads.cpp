// How experts are read: what is cut into requests, what is read next, what becomes of a read.

#include "residency/residency.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pyorch {

bool ResidencyTable::start_load(Expert & e, std::deque<ReadRequest> & queue) {
    const MoeLayer & l       = map.layers[e.layer];
    const int        n_roles = (int) l.tensors.size();
    for (int r = 0; r < n_roles; ++r) {
        e.block[r] = pool.alloc(l.tensors[r].block_bytes());
        if (!e.block[r]) {
            while (r-- > 0) {
                pool.free(e.block[r], l.tensors[r].block_bytes());
                e.block[r] = nullptr;
            }
            return false;
        }
    }
    for (int r = 0; r < n_roles; ++r) {
        const ExpertTensor & t      = l.tensors[r];
        const uint64_t       begin  = t.offset + e.id * t.stride;
        const uint64_t       end    = begin + t.stride;
        const bool           direct = t.reads_directly() && source->direct(t.file);
        const uint64_t       first  = direct ? begin / PAGE * PAGE : begin;
        const uint64_t       last   = direct ? (end + PAGE - 1) / PAGE * PAGE : end;
        e.addr[r]    = e.block[r] + (begin - first);
        e.pending[r] = 0;
        for (uint64_t at = first; at < end; at += read_bytes) {
            const uint64_t size = std::min(read_bytes, last - at);
            queue.push_back({ &e, r, t.file, at, size, std::min(at + size, end) - at, e.block[r] + (at - first) });
            ++e.pending[r];
        }
    }
    e.ready.store(0, std::memory_order_relaxed);
    e.state = Expert::LOADING;
    ++layer_of(e).n_loaded;
    return true;
}

// Takes back the requests for an expert that no reader works on yet.
void ResidencyTable::unqueue(Expert & e) {
    for (auto * queue : { &ahead, &demand }) {
        auto mine = std::stable_partition(queue->begin(), queue->end(), [&](const ReadRequest & r) { return r.expert != &e; });
        std::for_each(mine, queue->end(), [&](const ReadRequest & r) { --e.pending[r.role]; });
        queue->erase(mine, queue->end());
    }
}

// What was queued to be read ahead is demanded now.
void ResidencyTable::take_over_ahead(const std::vector<Expert *> & experts) {
    if (experts.empty()) {
        return;
    }
    auto keep = std::stable_partition(ahead.begin(), ahead.end(), [&](const ReadRequest & r) {
        return std::find(experts.begin(), experts.end(), r.expert) == experts.end();
    });
    demand.insert(demand.end(), keep, ahead.end());
    ahead.erase(keep, ahead.end());
}

void ResidencyTable::want_layer_ahead(int layer) {
    ahead_wanted.clear();
    if (layer < 0) {
        return;
    }
    Layer & l = layers[layer];
    for (int id = 0; id < l.n_expert; ++id) {
        if (l.experts[id].state == Expert::ABSENT) {
            l.experts[id].scanned = true;
            ahead_wanted.push_back(&l.experts[id]);
        }
    }
}

// Moves the next wanted expert into the queue, if there is memory for it.
bool ResidencyTable::next_ahead() {
    while (!ahead_wanted.empty()) {
        Expert & e = *ahead_wanted.front();
        Layer &  l = layer_of(e);
        if (e.state != Expert::ABSENT || e.in_use > 0 || (l.n_loaded >= l.max && !e.pinned)) {
            ahead_wanted.pop_front(); // there, or demanded, or one too many
            continue;
        }
        if (!make_room(l.slot_bytes, e.layer, false) || !start_load(e, ahead)) {
            if (n_in_use > 0) {
                return false; // the running layer will release memory
            }
            ahead_wanted.pop_front();
            continue;
        }
        ahead_wanted.pop_front();
        e.read_ahead = !e.pinned;
        return true;
    }
    return false;
}

void ResidencyTable::want(int layer, int from, std::vector<Want> & wants) {
    const int n = (int) layers.size();
    {
        std::lock_guard<std::mutex> lock(mutex);
        const int  since    = from < 0 ? last_layer : from;
        const int  distance = (layer - since - 1 + n) % n + 1;
        const bool late     = since >= 0 && (passing - since + n) % n >= distance;
        guesses.erase(std::remove_if(guesses.begin(), guesses.end(), [&](const Guess & g) { return g.expert->layer == layer; }), guesses.end());
        for (Want & w : wants) {
            Expert & e = layers[layer].experts[w.expert];
            w.absent = e.state == Expert::ABSENT;
            if (w.absent && w.wanted && !late) {
                guesses.push_back({ &e, w.probability });
            }
        }
    }
    work.notify_all();
}

void ResidencyTable::expect(int layer, const std::vector<float> & probability) {
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t id = 0; id < probability.size(); ++id) {
        layers[layer].experts[id].usage.probability = probability[id];
    }
}

void ResidencyTable::foresee(int layer, int expert, uint64_t next_use) {
    std::lock_guard<std::mutex> lock(mutex);
    layers[layer].experts[expert].usage.next_use = next_use;
}

void ResidencyTable::set_waiter(std::function<void()> waiter_) {
    std::lock_guard<std::mutex> lock(mutex);
    waiter = std::move(waiter_);
}

// A layer comes: what was guessed for it was right, or in vain, or is not wanted any more.
void ResidencyTable::settle_guesses(int layer) {
    guesses.erase(std::remove_if(guesses.begin(), guesses.end(), [&](const Guess & g) { return g.expert->layer == layer; }), guesses.end());
    Layer & l = layers[layer];
    for (int id = 0; id < l.n_expert; ++id) {
        l.experts[id].usage.probability = 1.0f / l.n_expert; // the forecast was of this pass
    }
    for (int id = 0; id < l.n_expert && n_predicted > 0; ++id) {
        Expert & e = l.experts[id];
        if (!e.predicted) {
            continue;
        }
        e.predicted = false;
        --n_predicted;
        if (e.in_use) {
            continue;
        }
        e.read_ahead = false;
        ++l.stats.prefetch_wasted;
        if (e.state == Expert::LOADING && e.in_flight == 0) {
            unqueue(e);
            if (e.pending_total() == 0) {
                drop(e);
            }
        }
    }
}

// Moves the best guess into the queue (FineMoE: probability over distance), if memory can be had for it.
bool ResidencyTable::next_guess() {
    const int n = (int) layers.size();
    auto priority = [&](const Guess & g) { return g.probability / std::max(1, (g.expert->layer - passing + n) % n); };
    while (!guesses.empty()) {
        auto best = std::max_element(guesses.begin(), guesses.end(), [&](const Guess & a, const Guess & b) { return priority(a) < priority(b); });
        Expert & e = *best->expert;
        guesses.erase(best);
        Layer & l = layer_of(e);
        if (e.state != Expert::ABSENT || e.in_use > 0 || l.n_loaded >= l.max) {
            continue;
        }
        const Spared spared = { now > (uint64_t) n ? now - n : 0, e.usage.probability > 0 ? e.usage.probability : INFINITY };
        if (!make_room(l.slot_bytes, e.layer, false, spared) || !start_load(e, ahead)) {
            continue;
        }
        e.read_ahead = e.predicted = true;
        ++n_predicted;
        return true;
    }
    return false;
}

bool ResidencyTable::is_idle() const {
    return demand.empty() && ahead.empty() && ahead_wanted.empty() && guesses.empty() && n_in_flight == 0;
}

bool ResidencyTable::pop_read(ReadRequest & request) {
    auto * queue = !demand.empty() ? &demand : !ahead.empty() || next_ahead() || next_guess() ? &ahead : nullptr;
    if (!queue) {
        return false;
    }
    request = queue->front();
    queue->pop_front();
    ++request.expert->in_flight;
    ++n_in_flight;
    return true;
}

bool ResidencyTable::next_read(ReadRequest & request) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopped) {
        if (pop_read(request)) {
            return true;
        }
        if (is_idle()) {
            idle.notify_all();
        }
        work.wait(lock);
    }
    return false;
}

bool ResidencyTable::try_next_read(ReadRequest & request) {
    std::lock_guard<std::mutex> lock(mutex);
    return pop_read(request);
}

void ResidencyTable::finish_read(const ReadRequest & request, int64_t result, uint64_t ns) {
    Expert &             e = *request.expert;
    const ExpertTensor & t = map.layers[e.layer].tensors[request.role];
    {
        std::lock_guard<std::mutex> lock(mutex);
        Layer & l = layer_of(e);
        --e.in_flight;
        --n_in_flight;
        --e.pending[request.role];
        totals.read_ns += ns;
        if (result > 0) {
            l.stats.bytes_read += (uint64_t) result;
            const double rate = (double) result / ((double) std::max<uint64_t>(ns, 1) * 1e-9);
            read_rate += (rate - read_rate) * (read_rate > 0 ? 0.02 : 1);
        }
        if (result < (int64_t) request.needed) {
            const char * path = map.files[t.file].path.c_str();
            const std::string why = result == -ESTALE ? "the file was changed after it was loaded" :
                result < 0 ? strerror((int) -result) : "the file ends before it";
            error = format("cannot read expert %d of %s from %s: %s", e.id, t.name.c_str(), path, why.c_str());
            e.ready.fetch_or(Expert::FAILED, std::memory_order_release);
            unqueue(e);
        } else if (e.pending[request.role] == 0 && !(e.ready.load(std::memory_order_relaxed) & Expert::FAILED)) {
            e.ready.fetch_or(1u << request.role, std::memory_order_release);
        }
        if (e.pending_total() == 0) {
            if (!(e.ready.load(std::memory_order_relaxed) & Expert::FAILED)) {
                e.state = Expert::RESIDENT;
                ++l.stats.loads;
                l.stats.prefetch_loads += e.read_ahead;
            } else if (e.in_use == 0) {
                drop(e);
            }
        }
        if (e.in_flight == 0) {
            space.notify_all();
        }
        if (n_waiting > 0) {
            arrived.notify_all();
        }
        if (is_idle()) {
            idle.notify_all();
        }
    }
}

double ResidencyTable::read_bytes_per_second() {
    std::lock_guard<std::mutex> lock(mutex);
    return read_rate;
}

void ResidencyTable::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
    }
    work.notify_all();
}

} // namespace pyorch
