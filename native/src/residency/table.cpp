#include "residency/table.h"

#include "base/cpu_time.h"
#include "loading/readers.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <sys/mman.h>
#include <thread>

namespace pyorch {

static PoolShares shares_of(const pyorch_config & config) {
    PoolShares shares = ALL_FULL;
    std::copy(std::begin(config.pool_shares), std::end(config.pool_shares), shares.begin() + (int) Form::FULL);
    return shares;
}

Table::Table(const ModelMap & map_, std::unique_ptr<Bank> bank_, std::unique_ptr<Source> source, const Codec & codec,
    const pyorch_config & config, const Policies & policies) :
        map(map_), bank(std::move(bank_)), loads(map, std::move(source), codec, plan_reads(config).bytes, mutex, *this),
        residents(map, *bank, policies, (pyorch_policy) config.policy,
            [this](Victims & victims, int layer, int id) {
                mutex.assert_held(); // the caller that asks for victims holds it
                residents.set_keys(victims, layer, id);
                if (stored.pools.any()) {
                    stored.set_keys(residents.expert(layer, id));
                }
            }),
        stored(residents), room(mutex.locked(), residents, stored, loads, shares_of(config)),
        ahead(residents, room, loads), streams(residents, loads), learning(map, values, mutex),
        recovery((pyorch_recovery) config.recovery) {
    for (const MoeLayer & layer : map.layers) {
        for (const auto & t : layer.tensors) {
            zeros_size = std::max(zeros_size, t.stride);
        }
    }
    bank->on_give_up([this](char * slot) {
        mutex.assert_held(); // the caller that takes or frees a slot holds it
        loads.given_up(mutex.locked(), slot);
    });
    if (zeros_size) {
        // Never written, so all of it maps to the one zero page of the operating system.
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

bool Table::has_nearly_all() {
    constexpr int LACKING = 16; // at most one of so many experts may be absent
    MutexLock     lock(mutex);
    int           n_lacking = 0, n_experts = 0;
    uint64_t      room = bank->budget();
    for (int i = 0; i < residents.n_layers(); ++i) {
        const Residents::Layer & layer = residents[i];
        n_lacking += layer.n_expert - residents.seats.n_resident(i) - layer.n_only_above;
        n_experts += layer.n_expert;
        room += layer.n_above * layer.slot_bytes;
    }
    return room >= map.slots_bytes() && n_lacking * LACKING <= n_experts;
}

void Table::count_tokens(uint64_t n) {
    MutexLock lock(mutex);
    totals.tokens += n;
}

// Sleeps until the compute threads' condition holds, and decodes meanwhile.
template <typename Condition>
void Table::wait_for_arrival(int layer, Condition is_met) {
    if (n_waiting++ == 0) {
        wait_begin = clock_ns();
        wait_layer = layer;
    }
    while (!is_met()) {
        if (!loads.decode_next(mutex.locked())) {
            arrived.wait(mutex);
        }
    }
    if (--n_waiting == 0) {
        residents.seats.counts(wait_layer).stall_ns += clock_ns() - wait_begin;
    }
}

// An expert that a layer waits for, or would wait for without guesses.
void Table::count_absent(const Residents::Layer & l, const Expert & e) {
    if ((e.absent() || e.guessed()) && e.kept != Form::COMPRESSED) {
        absent_bytes += (double) l.read_bytes;
    }
}

double Table::break_even() {
    MutexLock    lock(mutex);
    const auto   bytes = (double) residents[0].read_bytes;
    const double request =
        std::min((double) loads.guess_bytes(mutex.locked()), bytes / (double) map.layers[0].tensors.size());
    const double rest = 0.5 * request / bytes;
    // p * share = cpu * share + regret + (1 - p) * rest
    const double share = ahead.read_share();
    return std::min(
        1.0, (loads.read_rates(mutex.locked()).cpu_share() * share + room.regret() + rest) / (share + rest));
}

// A layer comes. The experts that it computes with are held, and count as hits and misses. The router's choice counts
// as used, even if others replace it: otherwise an absent expert would never seem worth its memory. streamed:
// ascending, experts of the layer that are read whatever pools have of them.
void Table::count_uses(int layer, const Demand & demand, const std::vector<int> & streamed) {
    auto &         l      = residents[layer];
    pyorch_stats & counts = residents.seats.counts(layer);
    const bool     scan   = demand.scans();
    values.passes(layer);
    ++totals.layer_passes;
    totals.tokens += demand.own ? demand.n_tokens : 0;

    if (!scan) {
        for (int id : demand.asked) {
            residents.used(l.experts[id]);
            stored.pools.used(layer, id, values.now());
        }
    }
    room.count_regret(layer, demand);
    ahead.fade_read_share();
    for (int id : demand.experts) {
        Expert & e = l.experts[id];
        if (!scan) {
            count_absent(l, e);
        }
        counts.hits += demand.counted && e.resident();
        counts.misses += demand.counted && !e.resident();
        ++e.uses;
        if (demand.counted && !e.resident() && !std::binary_search(streamed.begin(), streamed.end(), id)) {
            counts.compressed_hits += e.kept == Form::COMPRESSED;
            counts.sm_hits += e.kept == Form::SM_ONLY;
            counts.e_hits += e.kept == Form::E_ONLY;
        }
        if (e.read_ahead()) {
            ++counts.prefetch_hits;
            counts.prefetch_late += e.loading();
        }
        counts.prefetch_loads += e.loading() && e.unasked();
        e.read_for = scan && e.scanned() ? ReadFor::SCAN : ReadFor::DEMAND;
    }
}

void Table::acquire(Owner & owner, int layer, const Demand & demand) {
    learning.learn();
    MutexLock lock(mutex);

    // A decode that was aborted inside a layer never reached its release.
    if (!owner.held.empty() || owner.stream) {
        release_held(owner);
        space.notify_all();
    }
    room.widen(mutex.locked(), layer, demand);

    // A waiting layer holds nothing, so no circle can form. Layers are served in the order of their calls; otherwise a
    // layer that needs much could wait for ever while contexts that need little go on.
    const uint64_t turn    = n_arrived++;
    bool           counted = false;
    while (turn != n_served || !try_acquire(owner, layer, demand, counted)) {
        loads.wait(mutex.locked(), space); // a layer ends, or a read
    }
    if (++n_served != n_arrived) {
        space.notify_all();
    }

    // A prompt needs nearly all of the next layer too; the time of this layer's computing is there to read it.
    if (demand.scans() && (int) demand.experts.size() * 4 >= residents[layer].n_expert * 3) {
        ahead.want_layer(values.next_executed(layer));
    }
    note_visit(owner, layer, demand);
    lock.unlock();
    loads.wake();
}

// Holds all experts of the layer, and begins to read the absent ones. Or holds nothing, if they do not fit beside those
// that others hold. If the layer would not fit alone, its resident experts are held, and the rest is streamed.
// counted: the uses have been counted.
bool Table::try_acquire(Owner & owner, int layer, const Demand & demand, bool & counted) {
    auto & l = residents[layer];
    for (int id : demand.experts) {
        if (l.experts[id].holds == 0 && l.experts[id].failed()) {
            return false; // its last read, for an earlier decode, has not ended
        }
    }

    const bool fits  = room.fits(layer, demand.experts);
    int        spare = room.capacity_beside_window(layer) - l.n_pinned; // if the layer does not fit

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
        share(e, owner);
        if (e.absent() && !e.failed()) { // otherwise another context holds it, and had no memory for it: both fail
            absent.push_back(&e);
        } else if (e.loading()) {
            loading.push_back(&e.load);
        }
    }
    if (!counted) {
        counted = true;
        count_uses(layer, demand, streamed);
        ahead.settle(mutex.locked(), owner.context, layer);
    }
    const int n_frames = streamed.empty() ? 0 : room.window(layer);
    if (!absent.empty() || n_frames > 0) {
        room.make_room_within(layer, (int) absent.size());
        if (!room.make_room(mutex.locked(), layer, (int) absent.size() + n_frames, FOR_DEMAND)) {
            for (Expert * e : owner.held) {
                residents.seats.release(*e);
            }
            owner.held.clear();
            return false;
        }
    }
    for (size_t i = 0; i < demand.experts.size(); ++i) {
        l.experts[demand.experts[i]].load.n_rows = demand.rows.empty() ? 1 : demand.rows[i];
    }
    std::vector<Load *> started;
    for (Expert * e : absent) {
        if (residents.start_load(*e, demand.scans() ? ReadFor::SCAN : ReadFor::DEMAND)) {
            started.push_back(&e->load);
        } else {
            error    = format("out of memory for expert %d of layer %d", e->id, map.layers[layer].il);
            e->error = error;
            e->ready.store(Expert::FAILED, std::memory_order_release);
        }
    }
    const int n_processors = std::max(1, (int) std::thread::hardware_concurrency());
    const int n_recovering = std::min(n_processors, owner.n_threads + default_threads());
    loads.demand(mutex.locked(), started, loading,
        { orders_by_rows(layer) ? n_recovering : 0, recovery != PYORCH_RECOVERY_EXPONENTS_FIRST });
    if (!streamed.empty()) {
        streams.open(mutex.locked(), owner, layer, streamed, n_frames);
        error = owner.stream->error.empty() ? error : owner.stream->error;
    }
    return true;
}

bool Table::orders_by_rows(int layer) const {
    return recovery != PYORCH_RECOVERY_KERNELS && is_compressed(map.layers[layer]);
}

// False if an expert could not be read.
bool Table::release_held(Owner & owner) {
    bool failed = false;
    for (Expert * e : owner.held) {
        residents.seats.release(*e);
        if (e->failed()) {
            failed      = true;
            owner.error = e->error;
            if (e->holds == 0 && e->load.ended()) {
                residents.drop(*e);
            }
        } else if (e->kept != Form::ABSENT && e->resident()) {
            stored.settle(*e); // its rank has changed
        }
    }
    owner.held.clear();
    if (owner.stream) {
        if (!owner.stream->error.empty()) {
            failed      = true;
            owner.error = owner.stream->error;
        }
        streams.close(mutex.locked(), owner);
    }
    room.keep_budget(mutex.locked());
    return !failed;
}

bool Table::release(Owner & owner) {
    bool failed;
    change([&]() REQUIRES(mutex) {
        failed = !release_held(owner);
        totals.failures += failed;
    });
    return !failed;
}

void Table::forget(Owner & owner) {
    learning.forget(owner.context);
    change([&]() REQUIRES(mutex) {
        release_held(owner);
        ahead.forget(mutex.locked(), owner.context);
        if (is_idle()) {
            idle.notify_all();
        }
    });
}

const char * Table::address(const Owner & owner, int layer, int expert, int role, bool wait, const void * thread) {
    if (owner.stream && owner.stream->place_of[expert] >= 0) {
        return pass_by(*owner.stream, expert, role, wait, thread, owner.n_threads);
    }
    Expert &       e   = unlocked(layer, expert);
    const uint32_t bit = 1u << role;

    uint32_t ready = e.ready.load(std::memory_order_acquire);
    if (ready & bit) {
        return e.addr[role];
    }
    if (!wait && !(ready & Expert::FAILED)) {
        return nullptr;
    }
    learning.try_learn();
    MutexLock lock(mutex);
    wait_for_arrival(layer, [&] {
        ready = e.ready.load(std::memory_order_acquire);
        return (ready & (bit | Expert::FAILED)) || e.absent();
    });
    return ready & bit ? e.addr[role] : zeros;
}

const char * Table::pass_by(Stream & s, int expert, int role, bool wait, const void * thread, int n_threads) {
    MutexLock     lock(mutex);
    const int64_t number  = streams.ask(mutex.locked(), s, expert, role, thread, n_threads);
    const char *  address = Streams::address(s, number);
    if (!address && wait && s.error.empty()) {
        wait_for_arrival(s.layer, [&] { return (address = Streams::address(s, number)) || !s.error.empty(); });
    }
    return address || s.error.empty() ? address : zeros;
}

bool Table::share(Expert & e, Owner & other) {
    residents.hold(e);
    other.held.push_back(&e);
    return true;
}

bool Table::share(const Owner & owner, int layer, int expert, Owner & other) {
    MutexLock lock(mutex);
    Expert &  e = residents.expert(layer, expert);
    return std::find(owner.held.begin(), owner.held.end(), &e) != owner.held.end() && share(e, other);
}

bool Table::share_resident(int layer, int expert, Owner & other) {
    MutexLock lock(mutex);
    Expert &  e = residents.expert(layer, expert);
    return e.resident() && !e.failed() && share(e, other);
}

void Table::unshare(Owner & other) {
    change([&]() REQUIRES(mutex) { release_held(other); });
}

void Table::resident(int layer, std::vector<uint8_t> & mask, std::vector<uint8_t> * loading) {
    MutexLock lock(mutex);
    mask = residents.seats.mask(layer);
    if (loading) {
        loading->resize(mask.size());
        for (size_t id = 0; id < mask.size(); ++id) {
            (*loading)[id] = residents.expert(layer, (int) id).loading();
        }
    }
}

void Table::mark(int layer, std::vector<uint8_t> & mask) {
    MutexLock lock(mutex);
    residents.seats.mark(layer, mask);
}

bool Table::read_time(int layer, double & queued, double & expert, double & busy) {
    MutexLock       lock(mutex);
    const ReadRates rates = loads.read_rates(mutex.locked());
    const double    rate  = rates.bytes_per_second();
    if (!(rate > 0)) {
        return false;
    }
    queued = (double) loads.bytes_demanded(mutex.locked()) / rate;
    expert = (double) residents[layer].read_bytes / rate;
    busy   = rates.busy_share();
    return true;
}

void Table::set_elsewhere(int layer, const std::vector<uint8_t> & elsewhere) {
    MutexLock lock(mutex);
    for (int id = 0; id < residents[layer].n_expert; ++id) {
        residents.expert(layer, id).elsewhere = elsewhere[id] || map.layers[layer].lacks(id);
    }
}

void Table::set_above(int layer, const std::vector<uint8_t> & is_above) {
    MutexLock lock(mutex);
    for (int id = 0; id < residents[layer].n_expert; ++id) {
        residents.set_above(residents.expert(layer, id), is_above[id] != 0);
    }
}

void Table::want(const void * context, int layer, int from, std::vector<Want> & wants) {
    {
        MutexLock lock(mutex);
        ahead.want(context, layer, from, wants);
    }
    loads.wake();
}

void Table::defer(int layer, const std::vector<int> & experts) {
    {
        MutexLock lock(mutex);
        ahead.defer(layer, experts);
    }
    loads.wake();
}

bool Table::order_ahead(const Locked & locked) {
    mutex.assert_held(locked);
    return !layer_waits() && ahead.start_order(locked);
}

bool Table::order_guess(const Locked & locked) {
    mutex.assert_held(locked);
    const bool did = !layer_waits() && ahead.start_guess(locked);
    if (!did && is_idle()) {
        idle.notify_all();
    }
    return did;
}

Staged Table::stage(const Locked & locked, Load & load) {
    mutex.assert_held(locked);
    return stored.stage(load);
}

void Table::published(const Locked & locked, Load & load, int role, const char * address) {
    mutex.assert_held(locked);
    if (load.stream) {
        load.stream->frame_of(load).address = address;
        return;
    }
    Expert & e   = residents.expert_of(load);
    e.addr[role] = address;
    e.ready.fetch_or(1u << role, std::memory_order_release);
}

void Table::failed(const Locked & locked, Load & load, const std::string & sentence) {
    mutex.assert_held(locked);
    error = sentence;
    if (load.stream) {
        load.stream->error = sentence;
        return;
    }
    residents.expert_of(load).error = sentence;
    residents.expert_of(load).ready.fetch_or(Expert::FAILED, std::memory_order_release);
}

void Table::finished(const Locked & locked, Load & load) {
    mutex.assert_held(locked);
    const bool lets_go = load.in_flight == 0;
    if (load.stream) {
        streams.finished(locked, load);
    } else {
        expert_finished(residents.expert_of(load));
    }
    room.keep_budget(mutex.locked());
    if (lets_go) {
        space.notify_all();
        loads.wake(); // memory may be free now, and a reader sleep for it, if a decode thread ends this
    }
    if (n_waiting > 0) {
        arrived.notify_all();
    }
    if (is_idle()) {
        idle.notify_all();
    }
}

// Threads that wait for a matrix decode meanwhile.
void Table::decodable(const Locked & locked) {
    mutex.assert_held(locked);
    if (n_waiting > 0) {
        arrived.notify_all();
    }
    idle.notify_all(); // wait_idle()
}

void Table::expert_finished(Expert & e) {
    Load &     load       = e.load;
    const bool compressed = is_compressed(map.layers[e.layer]);
    if (load.ended() && load.failed && compressed) {
        stored.keep(e, Form::ABSENT); // other loads may wait for that memory
    }
    if (load.ended() && !load.failed) {
        residents.arrived(e);
        if (compressed) {
            load.in_memory = load.damaged ? 0 : STORED_PARTS;
            residents.unstage(load);
            stored.settle(e);
        }
    } else if (load.ended() && e.holds == 0) {
        residents.drop(e);
    } else {
        ahead.end_abandoned(mutex.locked(), e);
    }
}

// Changes the named experts of a layer; or no expert, if one does not exist.
template <typename Change>
void Table::for_each(int il, const int32_t * experts, int n, Change change_expert) {
    change([&]() REQUIRES(mutex) {
        const int layer = layer_index(il);
        for (int i = 0; i < n; ++i) {
            residents.checked(layer, experts[i]);
        }
        for (int i = 0; i < n; ++i) {
            change_expert(residents.expert(layer, experts[i]));
        }
    });
}

void Table::prefetch(int il, const int32_t * experts, int n) {
    for_each(il, experts, n, [&](Expert & e) REQUIRES(mutex) {
        e.abandoned = false; // an abandoned guess is an order now
        if (e.absent() && !map.layers[e.layer].lacks(e.id)) {
            // A call by name counts as a use now; otherwise the expert would be the next victim.
            residents.used(e);
            ahead.order_by_name(e);
        }
    });
}

void Table::pin(int il, const int32_t * experts, int n) {
    change([&]() REQUIRES(mutex) {
        const int         layer = layer_index(il);
        std::vector<bool> also(residents[layer].n_expert);
        for (int i = 0; i < n; ++i) {
            const Expert & e = residents.checked(layer, experts[i]);
            if (map.layers[layer].lacks(e.id)) {
                throw Failure(
                    PYORCH_INVALID, format("expert %d of layer %d is not in this share of the experts", e.id, il));
            }
            also[e.id] = !e.pinned;
        }
        room.check_pins(layer, (int) std::count(also.begin(), also.end(), true));
        for (int i = n - 1; i >= 0; --i) {
            Expert & e = residents.expert(layer, experts[i]);
            if (e.pinned) {
                continue;
            }
            residents.pin(e);
            if (e.absent()) {
                ahead.order_first(e);
            }
        }
        room.reserve(mutex.locked());
    });
}

void Table::offer(int il, int expert, const void * bytes, uint64_t size) {
    MutexLock        lock(mutex);
    const int        layer = layer_index(il);
    const MoeLayer & of    = map.layers[layer];
    const Expert &   e     = residents.checked(layer, expert);
    uint64_t         all   = 0;
    for (int role = 0; role < (int) of.tensors.size(); ++role) {
        all += in_model(of, role, expert).bytes;
    }
    if (size != all) {
        throw Failure(PYORCH_INVALID,
            format("an expert of layer %d has %llu bytes, not %llu", il, (unsigned long long) all,
                (unsigned long long) size));
    }
    if (e.absent() && !of.pack) {
        loads.offer(
            mutex.locked(), layer, expert, std::vector<char>((const char *) bytes, (const char *) bytes + size));
    }
}

void Table::unpin(int il, const int32_t * experts, int n) {
    for_each(il, experts, n, [&](Expert & e) REQUIRES(mutex) {
        if (e.pinned) {
            residents.unpin(e);
        }
    });
    change([&]() REQUIRES(mutex) { room.reserve(mutex.locked()); }); // pools may get memory back
}

void Table::evict(int il, const int32_t * experts, int n) {
    for_each(il, experts, n, [&](Expert & e) REQUIRES(mutex) {
        if (e.may_go()) {
            ++residents.seats.counts(e.layer).evictions;
            residents.drop(e);
        }
        if (e.kept != Form::ABSENT && !e.load.staged) {
            stored.keep(e, Form::ABSENT);
        }
    });
}

void Table::set_uses(int il, const double * uses, int n) {
    MutexLock lock(mutex);
    const int layer    = layer_index(il);
    const int n_expert = residents[layer].n_expert;
    if (n != n_expert) {
        throw Failure(PYORCH_INVALID, format("uses of %d experts were given, layer %d has %d", n, il, n_expert));
    }
    if (!std::all_of(uses, uses + n, [](double count) { return count >= 0 && std::isfinite(count); })) {
        throw Failure(PYORCH_INVALID, format("uses of experts of layer %d are no numbers from 0 on", il));
    }
    stored.pools.begin_with(layer, uses, values.now());
}

// A layer was routed. A prompt says little about the experts of decoding, and a warm-up, which asks for no expert,
// nothing. If all experts fit, none is evicted.
void Table::note_visit(const Owner & owner, int layer, const Demand & demand) {
    if (learning.learns(mutex.locked()) && !demand.scans() && !demand.asked.empty() &&
        bank->budget() < map.slots_bytes()) {
        learning.note(mutex.locked(),
            { owner.context, layer, demand.continues, demand.learned ? std::vector<int>() : demand.asked });
    }
}

} // namespace pyorch
