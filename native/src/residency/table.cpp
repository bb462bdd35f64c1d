// What the compute threads ask of the table: holding experts, and their addresses.

#include "residency/table.h"

#include "loading/readers.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>
#include <sys/mman.h>

namespace pyorch {

uint64_t Table::clock_ns() {
    using namespace std::chrono;
    return (uint64_t) duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

static std::vector<int> n_experts(const ModelMap & map) {
    std::vector<int> n;
    for (const auto & layer : map.layers) {
        n.push_back(layer.n_expert);
    }
    return n;
}

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

Table::Table(const ModelMap & map_, std::unique_ptr<Bank> bank_, std::unique_ptr<Source> source, Codecs codecs,
    const pyorch_config & config, const Policies & policies) :
        map(map_), bank(std::move(bank_)),
        loads(map, std::move(source), std::move(codecs), plan_reads(config).bytes, mutex, *this),
        layers(map.layers.size()), values(n_experts(map), HOST, policies, (pyorch_policy) config.policy), order(values),
        pools(map) {
    if (bank->budget() < map.floor_bytes()) {
        throw Failure(PYORCH_BUDGET,
            format("budget %s is below the floor of %s (twice the experts of a token, and one)",
                mebibytes(bank->budget()).c_str(), mebibytes(map.floor_bytes()).c_str()));
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        Layer & layer                 = layers[i];
        layer_by_il[map.layers[i].il] = (int) i;
        layer.n_expert                = map.layers[i].n_expert;
        layer.size_class              = bank->size_class((int) i, PART_MATRICES);
        layer.slot_bytes              = map.layers[i].slot_bytes();
        layer.read_bytes              = mean_read_bytes(map.layers[i]);
        layer.passes.resize(map.layers[i].tensors.size());
        std::iota(layer.passes.begin(), layer.passes.end(), 0);
        layer.experts = std::make_unique<Expert[]>(layer.n_expert);
        layer.is_resident.resize(layer.n_expert);
        pressure.resize(std::max(pressure.size(), (size_t) layer.size_class + 1));
        for (int id = 0; id < layer.n_expert; ++id) {
            Expert & e    = layer.experts[id];
            e.load.layer  = (int) i;
            e.load.expert = id;
        }
        for (const auto & t : map.layers[i].tensors) {
            zeros_size = std::max(zeros_size, t.stride);
        }
    }
    bank->on_give_up([this](char * slot) { loads.given_up(slot); });
    std::copy(std::begin(config.pool_shares), std::end(config.pool_shares), shares.begin() + (int) Form::FULL);
    divide_budget(bank->budget());
    make_learner_of();
    if (zeros_size) {
        // Never written, so it is the system's one page of zeros however large it is.
        void * p = mmap(nullptr, zeros_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) {
            throw Failure(
                PYORCH_MEMORY, format("cannot reserve %s: %s", mebibytes(zeros_size).c_str(), strerror(errno)));
        }
        zeros = (char *) p;
    }
}

Table::~Table() {
    if (zeros) {
        munmap(zeros, zeros_size);
    }
}

int Table::layer_index(int il) const {
    const auto layer = layer_by_il.find(il);
    if (layer == layer_by_il.end()) {
        throw Failure(PYORCH_INVALID, format("layer %d has no routed experts", il));
    }
    return layer->second;
}

void Table::hold(Expert & e) {
    e.wanted();
    if (e.in_use++ == 0) {
        ++n_in_use;
        changed(e);
    }
}

void Table::unhold(Expert & e) {
    if (--e.in_use == 0) {
        --n_in_use;
        changed(e);
    }
}

// What had to go since the layer last came was missed, or not. A wide batch needs all: it says nothing.
void Table::count_regret(Layer & l, const Demand & demand) {
    for (int id : l.displaced) {
        l.experts[id].displaced = false;
        if (!demand.scans()) {
            regret.add(std::binary_search(demand.experts.begin(), demand.experts.end(), id));
        }
    }
    l.displaced.clear();
}

void Table::count_seconds(const Layer & l, const Expert & e) {
    const double rate = loads.bytes_per_second();
    if (rate > 0 && (e.absent() || e.guessed())) {
        const double   free  = (1 - loads.cpu_share()) / rate;
        const uint64_t bytes = e.kept == Form::COMPRESSED ? 0 : l.read_bytes;
        reads.absent += free * (double) bytes;
        reads.saved += free * (double) (e.resident() ? bytes : e.loading() ? e.load.read : 0);
    }
}

double Table::break_even() {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  bytes   = (double) layers[0].read_bytes;
    const double                request = std::min((double) GUESS_BYTES, bytes / (double) map.layers[0].tensors.size());
    const double                rest    = 0.5 * request / bytes;
    // p * share = cpu * share + regret + (1 - p) * rest
    return std::min(1.0, (loads.cpu_share() * read_share + regret.value() + rest) / (read_share + rest));
}

Table::ReadSeconds Table::read_seconds() {
    std::lock_guard<std::mutex> lock(mutex);
    return reads;
}

// A layer comes. What it computes with is held: hits and misses. What its router asked for is used, even where another
// expert stands in for it: else what is never computed with would never seem worth having.
// streamed: ascending, of what it computes with; that comes without what pools have of it.
void Table::count_uses(int layer, const Demand & demand, const std::vector<int> & streamed) {
    Layer &    l    = layers[layer];
    const bool scan = demand.scans();
    values.passes(layer);
    ++totals.layer_passes;
    totals.tokens += demand.own ? demand.n_tokens : 0;

    if (!scan) {
        for (int id : demand.asked) {
            used(l.experts[id]);
            pools.used(layer, id, values.now());
        }
    }
    count_regret(l, demand);
    read_share += (1 - read_share) / 20000; // where no guess pays, one is tried now and then
    for (int id : demand.experts) {
        Expert & e = l.experts[id];
        if (!scan) {
            count_seconds(l, e);
        }
        e.resident() ? ++l.stats.hits : ++l.stats.misses;
        ++e.uses;
        if (!e.resident() && !std::binary_search(streamed.begin(), streamed.end(), id)) {
            l.stats.compressed_hits += e.kept == Form::COMPRESSED;
            l.stats.sm_hits += e.kept == Form::SM_ONLY;
            l.stats.e_hits += e.kept == Form::E_ONLY;
        }
        if (e.read_ahead()) {
            ++l.stats.prefetch_hits;
            l.stats.prefetch_late += e.loading();
        }
        l.stats.prefetch_loads += e.loading() && e.unasked();
        e.read_for = scan && e.scanned() ? ReadFor::SCAN : ReadFor::DEMAND;
    }
}

void Table::acquire(Owner & owner, int layer, const Demand & demand) {
    if (has_visits) {
        std::lock_guard<std::mutex> learning_lock(learning);
        learn();
    }
    std::unique_lock<std::mutex> lock(mutex);

    // A decode that was aborted inside a layer never reached its release.
    if (!owner.held.empty() || owner.stream) {
        bool ignored;
        release_held(owner, ignored);
        space.notify_all();
    }
    widen(layer, demand);

    // Who waits holds nothing, so nobody waits for who waits. Who came first is served first, else a layer that needs
    // much would wait for ever beside contexts that need little.
    const uint64_t turn    = n_arrived++;
    bool           counted = false;
    while (turn != n_served || !try_acquire(owner, layer, demand, counted)) {
        loads.wait(lock, space); // a layer that ends, or a read
    }
    if (++n_served != n_arrived) {
        space.notify_all();
    }

    // A prompt needs nearly all of the next layer too, and this layer's compute is the time to read it.
    if (demand.scans() && (int) demand.experts.size() * 4 >= layers[layer].n_expert * 3) {
        want_layer_ahead(values.next_executed(layer));
    }
    note_visit(owner, layer, demand);
    lock.unlock();
    loads.wake();
}

// Holds all that the layer computes with and begins to read what is absent of it; or holds nothing, because it does not
// fit beside what others hold. Of a layer that would not fit alone, what is there is held, and the rest streamed.
// counted: the uses have been counted.
bool Table::try_acquire(Owner & owner, int layer, const Demand & demand, bool & counted) {
    Layer & l = layers[layer];
    for (int id : demand.experts) {
        if (l.experts[id].in_use == 0 && l.experts[id].failed()) {
            return false; // for an earlier decode, whose last read has not ended
        }
    }

    const int n_unpinned = (int) std::count_if(
        demand.experts.begin(), demand.experts.end(), [&](int id) { return !l.experts[id].pinned; });
    const bool fits  = l.n_pinned + n_unpinned <= capacity(layer);
    int        spare = fits ? n_unpinned : capacity_beside_window(layer) - l.n_pinned;

    std::vector<Expert *> absent;
    std::vector<Load *>   loading;
    std::vector<int>      streamed;
    for (int id : demand.experts) {
        Expert & e = l.experts[id];
        if (!fits && !e.pinned && (e.absent() || spare == 0)) {
            streamed.push_back(id);
            continue;
        }
        spare -= !e.pinned;
        hold(e);
        owner.held.push_back(&e);
        if (e.absent() && !e.failed()) { // else another context holds it, for which there was no memory: both fail
            absent.push_back(&e);
        } else if (e.loading()) {
            loading.push_back(&e.load);
        }
    }
    if (!counted) {
        counted = true;
        count_uses(layer, demand, streamed);
        settle(owner.context, layer);
    }
    const int n_frames = streamed.empty() ? 0 : window(layer);
    if (!absent.empty() || n_frames > 0) {
        const int over = order.n(layer) + (int) absent.size() - values.max(layer);
        if (over > 0) {
            shrink_layer(layer, over);
        }
        if (!make_room(layer, (int) absent.size() + n_frames, FOR_DEMAND, INFINITY)) {
            for (Expert * e : owner.held) {
                unhold(*e);
            }
            owner.held.clear();
            return false;
        }
    }
    std::vector<Load *> started;
    for (Expert * e : absent) {
        if (start_load(*e, demand.scans() ? ReadFor::SCAN : ReadFor::DEMAND)) {
            started.push_back(&e->load);
        } else {
            error    = format("out of memory for expert %d of layer %d", e->id(), map.layers[layer].il);
            e->error = error;
            e->ready.store(Expert::FAILED, std::memory_order_release);
        }
    }
    loads.demand(started, loading);
    if (!streamed.empty()) {
        open_stream(owner, layer, streamed);
    }
    return true;
}

void Table::release_held(Owner & owner, bool & failed) {
    failed = false;
    for (Expert * e : owner.held) {
        unhold(*e);
        if (e->failed()) {
            failed      = true;
            owner.error = e->error;
            if (e->in_use == 0 && e->load.ended()) {
                drop(*e);
            }
        } else if (e->kept != Form::ABSENT && e->resident()) {
            settle_parts(*e); // it has another rank now
        }
    }
    owner.held.clear();
    if (owner.stream) {
        if (!owner.stream->error.empty()) {
            failed      = true;
            owner.error = owner.stream->error;
        }
        close_stream(owner);
    }
    keep_budget();
}

bool Table::release(Owner & owner) {
    bool failed;
    {
        std::lock_guard<std::mutex> lock(mutex);
        release_held(owner, failed);
        totals.failures += failed;
    }
    space.notify_all();
    loads.wake();
    return !failed;
}

void Table::forget(Owner & owner) {
    {
        std::lock_guard<std::mutex> learning_lock(learning);
        std::lock_guard<std::mutex> lock(mutex);
        forget_visits(owner.context);
        bool ignored;
        release_held(owner, ignored);
        guesses.forget(owner.context);
        passages.erase(owner.context);
        for (int layer = 0; layer < (int) layers.size(); ++layer) {
            settle_guessed(layers[layer], owner.context);
            if (layers[layer].forecast_for == owner.context) {
                end_forecast(layer);
            }
        }
        if (is_idle()) {
            idle.notify_all();
        }
    }
    space.notify_all();
    loads.wake();
}

const char * Table::address(const Owner & owner, int layer, int expert, int role, bool wait, const void * thread) {
    if (owner.stream && owner.stream->place_of[expert] >= 0) {
        return pass_by(*owner.stream, expert, role, wait, thread, owner.n_threads);
    }
    Expert &       e   = layers[layer].experts[expert];
    const uint32_t bit = 1u << role;

    uint32_t ready = e.ready.load(std::memory_order_acquire);
    if (ready & bit) {
        return e.addr[role];
    }
    if (!wait && !(ready & Expert::FAILED)) {
        return nullptr;
    }
    if (has_visits) {
        std::unique_lock<std::mutex> learning_lock(learning, std::try_to_lock);
        if (learning_lock) {
            learn();
        }
    }
    std::unique_lock<std::mutex> lock(mutex);
    wait_for_arrival(lock, layer, [&] {
        ready = e.ready.load(std::memory_order_acquire);
        return (ready & (bit | Expert::FAILED)) || e.absent();
    });
    return ready & bit ? e.addr[role] : zeros;
}

bool Table::fits(int layer, const std::vector<int> & experts) {
    std::lock_guard<std::mutex> lock(mutex);
    const Layer &               l = layers[layer];
    const auto                  n_unpinned =
        std::count_if(experts.begin(), experts.end(), [&](int id) { return !l.experts[id].pinned; });
    return l.n_pinned + n_unpinned <= capacity(layer);
}

bool Table::share(const Owner & owner, int layer, int expert, Owner & other) {
    std::lock_guard<std::mutex> lock(mutex);
    Expert &                    e = layers[layer].experts[expert];
    if (std::find(owner.held.begin(), owner.held.end(), &e) == owner.held.end()) {
        return false;
    }
    hold(e);
    other.held.push_back(&e);
    return true;
}

bool Table::share_resident(int layer, int expert, Owner & other) {
    std::lock_guard<std::mutex> lock(mutex);
    Expert &                    e = layers[layer].experts[expert];
    if (!e.resident() || e.failed()) {
        return false;
    }
    hold(e);
    other.held.push_back(&e);
    return true;
}

void Table::unshare(Owner & other) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        bool                        ignored;
        release_held(other, ignored);
    }
    space.notify_all();
    loads.wake();
}

void Table::resident(int layer, std::vector<uint8_t> & mask, std::vector<uint8_t> * loading) {
    std::lock_guard<std::mutex> lock(mutex);
    const Layer &               l = layers[layer];
    mask                          = l.is_resident;
    if (loading) {
        loading->resize(l.n_expert);
        for (int id = 0; id < l.n_expert; ++id) {
            (*loading)[id] = l.experts[id].loading();
        }
    }
}

double Table::read_bytes_per_second() {
    std::lock_guard<std::mutex> lock(mutex);
    return loads.bytes_per_second();
}

bool Table::read_time(int layer, double & queued, double & expert) {
    std::lock_guard<std::mutex> lock(mutex);
    const double                rate = loads.bytes_per_second();
    if (!(rate > 0)) {
        return false;
    }
    queued = (double) loads.bytes_demanded() / rate;
    expert = (double) layers[layer].read_bytes / rate;
    return true;
}

} // namespace pyorch
