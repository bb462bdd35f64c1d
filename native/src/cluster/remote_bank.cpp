#include "cluster/remote_bank.h"

#include "base/status.h"
#include "cluster/replicas.h"

#include <algorithm>
#include <iterator>

namespace pyorch {

RemoteBank::RemoteBank(
    std::vector<LayerShape> of_layers, std::vector<std::vector<uint8_t>> lacking_, std::chrono::milliseconds patience) :
        layers(std::move(of_layers)), lacking(std::move(lacking_)),
        lacks_any(std::any_of(lacking.begin(), lacking.end(),
            [](const auto & layer) {
                return std::any_of(layer.begin(), layer.end(), [](uint8_t e) { return e != 0; });
            })),
        patience(patience) {
    for (const LayerShape & layer : layers) {
        placement.emplace_back(layer.n_expert);
    }
}

RemoteBank::~RemoteBank() {
    std::vector<std::shared_ptr<Peer>> last; // destroyed without the mutex, which their threads may take
    MutexLock                          lock(mutex);
    last.swap(peers);
    placement.assign(layers.size(), {});
}

void RemoteBank::on_change(Changed to) { changed = std::move(to); }

int RemoteBank::connect(const PeerConfig & config) {
    auto              connected = std::make_shared<Peer>(config, [this] { tell_all(); });
    const std::string why       = connected->wait_joined();
    if (!why.empty()) {
        throw Failure(PYORCH_IO, why);
    }
    MutexLock lock(mutex);
    peers.push_back(std::move(connected));
    return (int) peers.size() - 1;
}

std::shared_ptr<Peer> RemoteBank::peer(int number) {
    MutexLock lock(mutex);
    if (number < 0 || number >= (int) peers.size() || !peers[number]) {
        throw Failure(PYORCH_INVALID, format("there is no server %d", number));
    }
    return peers[number];
}

void RemoteBank::disconnect(int number) {
    std::shared_ptr<Peer> gone = peer(number);
    {
        MutexLock lock(mutex);
        peers[number] = nullptr;
    }
    tell_all();
}

void RemoteBank::place(int layer, const std::vector<int> & to, int n_places) {
    is_trial = false;
    {
        MutexLock                     lock(mutex);
        std::vector<std::vector<int>> of_layer(layers[layer].n_expert);
        for (size_t i = 0; i < to.size(); ++i) {
            if (to[i] < -1 || to[i] >= (int) peers.size() || (to[i] >= 0 && !peers[to[i]])) {
                throw Failure(PYORCH_INVALID, format("there is no server %d", to[i]));
            }
            std::vector<int> & places = of_layer[i / n_places];
            if (to[i] >= 0 && places.size() == i % n_places) { // nothing after the end
                places.push_back(to[i]);
            }
        }
        placement[layer] = std::move(of_layer);
        placed_at        = Clock::now();
        is_active        = std::any_of(placement.begin(), placement.end(), [](const auto & l) {
            return std::any_of(l.begin(), l.end(), [](const auto & places) { return !places.empty(); });
        });
    }
    arrived.notify_all();
    tell(layer);
}

// Takes from each server the slots of experts that are read sooner than it answers, fewest experts first: reads queue
// up. Returns the number of slots. n_read: experts that are read in any case. A read of s seconds from a disk for which
// layers wait a share r of the time delays them by r / (1 - r) s, which counts like waiting of this layer: s / (1 - r)
// in all. With one stream, r is only its own waiting, and the estimate errs towards asking.
size_t RemoteBank::keep_for_reading(int layer, const ReadCost & read, int n_read,
    const std::vector<std::vector<int>> & slots_of, std::vector<std::vector<int>> & experts_at) const {
    std::vector<size_t> order;
    for (size_t peer = 0; peer < experts_at.size(); ++peer) {
        const auto & held = experts_at[peer];
        if (!held.empty() && std::none_of(held.begin(), held.end(), [&](int e) { return lacks(layer, e); })) {
            order.push_back(peer);
        }
    }
    std::stable_sort(
        order.begin(), order.end(), [&](size_t a, size_t b) { return experts_at[a].size() < experts_at[b].size(); });
    size_t n_kept = 0;
    for (size_t peer : order) {
        size_t n_slots = 0;
        for (int e : experts_at[peer]) {
            n_slots += slots_of[e].size();
        }
        const auto   n_experts = (int) experts_at[peer].size();
        const size_t n_parts   = (n_slots + peers[peer]->max_slots() - 1) / peers[peer]->max_slots();
        const double seconds   = read.queued + n_read * read.expert + n_experts * read.expert / (1 - read.busy);
        const double answer    = (double) n_parts * peers[peer]->answer_seconds((int) (n_slots / n_parts));
        if (seconds < answer) {
            n_read += n_experts;
            n_kept += n_slots;
            experts_at[peer].clear();
        }
    }
    return n_kept;
}

void RemoteBank::mark(int layer, std::vector<uint8_t> & mask) {
    MutexLock    lock(mutex);
    const auto & of_layer = placement[layer];
    for (size_t e = 0; e < of_layer.size(); ++e) {
        mask[e] |= std::any_of(
            of_layer[e].begin(), of_layer[e].end(), [&](int peer) REQUIRES(mutex) { return computes(peer); });
    }
}

void RemoteBank::tell(int layer) {
    MutexLock telling_lock(telling);
    if (changed) {
        std::vector<uint8_t> elsewhere(layers[layer].n_expert);
        mark(layer, elsewhere);
        changed(layer, elsewhere);
    }
}

void RemoteBank::tell_all() {
    {
        MutexLock lock(mutex); // otherwise a thread that is about to wait would miss it
    }
    arrived.notify_all();
    for (int layer = 0; layer < (int) layers.size(); ++layer) {
        tell(layer);
    }
}

// The time of the last placement or loss.
Clock::time_point RemoteBank::last_change() const {
    Clock::time_point last = placed_at;
    for (const auto & peer : peers) {
        last = peer ? std::max(last, peer->lost_since()) : last;
    }
    return last;
}

// By server: the experts to ask it for. Without experts for which no joined server has room.
// failed: numbers of servers not to ask. is_chosen: becomes, by expert, whether a server was chosen.
std::vector<std::vector<int>> RemoteBank::choose(int layer, const std::vector<int> & wanted,
    const std::vector<std::vector<int>> & slots_of, const std::vector<int> & failed,
    std::vector<uint8_t> & is_chosen) const {
    std::vector<pyorch_pace> paces;
    for (const auto & peer : peers) {
        paces.push_back(peer && peer->joined() ? peer->pace() : pyorch_pace{});
    }
    std::vector<std::vector<int>> places;
    std::vector<int>              n_slots;
    for (int e : wanted) {
        const auto & of_expert = placement[layer][e];
        n_slots.push_back((int) slots_of[e].size());
        places.emplace_back();
        std::copy_if(
            of_expert.begin(), of_expert.end(), std::back_inserter(places.back()), [&](int peer) REQUIRES(mutex) {
                return computes(peer) && n_slots.back() <= peers[peer]->max_slots() &&
                    std::find(failed.begin(), failed.end(), peer) == failed.end();
            });
    }
    const std::vector<int>        chosen = choose_replicas(places, n_slots, paces);
    std::vector<std::vector<int>> experts_at(peers.size());
    is_chosen.assign(layers[layer].n_expert, 0);
    for (size_t i = 0; i < wanted.size(); ++i) {
        if (chosen[i] >= 0) {
            experts_at[chosen[i]].push_back(wanted[i]);
            is_chosen[wanted[i]] = 1;
        }
    }
    return experts_at;
}

std::vector<RemoteRows> RemoteBank::send(int layer, int n_tokens, int n_used, const int32_t * experts,
    const float * weights, const float * inputs, const std::vector<uint8_t> & here, const ReadCost & read,
    std::vector<uint8_t> & elsewhere) {
    std::vector<std::shared_ptr<Peer>> asked; // by request; null: sent later
    std::vector<RemoteRows>            rows;
    std::vector<RowType>               types;
    {
        MutexLock                     lock(mutex);
        const auto &                  of_layer = placement[layer];
        std::vector<std::vector<int>> slots_of(of_layer.size());
        std::vector<int>              wanted;
        std::vector<uint8_t>          absent(of_layer.size()); // and no other server is asked for it
        for (int slot = 0; slot < n_tokens * n_used; ++slot) {
            const int e = experts[slot];
            if (!here[e] && (!of_layer[e].empty() || lacks(layer, e))) {
                if (slots_of[e].empty()) {
                    wanted.push_back(e);
                }
                slots_of[e].push_back(slot);
            }
            absent[e] = !here[e] && !lacks(layer, e);
        }
        if (wanted.empty()) {
            return {};
        }
        std::vector<uint8_t>          is_chosen;
        std::vector<std::vector<int>> experts_at = choose(layer, wanted, slots_of, {}, is_chosen);
        for (int e : wanted) {
            absent[e] = absent[e] && !is_chosen[e];
        }
        if (read.known()) {
            const auto n_absent = (int) std::count(absent.begin(), absent.end(), 1);
            counters.read += keep_for_reading(layer, read, n_absent, slots_of, experts_at);
        }
        for (size_t peer = 0; peer < peers.size(); ++peer) {
            if (experts_at[peer].empty()) {
                continue;
            }
            // All rows of an expert are in one request. Rows beyond the server's room are computed here, or asked for
            // after its answer.
            const size_t first = rows.size(), most = peers[peer]->max_slots();
            int64_t      left = peers[peer]->room();
            for (int e : experts_at[peer]) {
                const size_t n      = slots_of[e].size();
                const auto   to_ask = (left -= (int64_t) n) >= 0 ? peers[peer] : nullptr;
                if (!to_ask && !lacks(layer, e)) {
                    continue;
                }
                if (rows.size() == first || rows.back().slots.size() + n > most || asked.back() != to_ask) {
                    asked.push_back(to_ask);
                    rows.emplace_back();
                    rows.back().peer = (int) peer;
                    types.push_back(peers[peer]->config.rows);
                }
                rows.back().slots.insert(rows.back().slots.end(), slots_of[e].begin(), slots_of[e].end());
            }
        }
        const size_t first = rows.size(), most = ExpertRows::MAX_SLOTS;
        for (int e : wanted) { // of no joined server: send_again() waits for one
            if (is_chosen[e] || !lacks(layer, e) || slots_of[e].size() > most) {
                continue;
            }
            if (rows.size() == first || rows.back().slots.size() + slots_of[e].size() > most) {
                asked.push_back(nullptr);
                rows.emplace_back();
                types.push_back(RowType::F32);
            }
            rows.back().slots.insert(rows.back().slots.end(), slots_of[e].begin(), slots_of[e].end());
        }
    }
    uint64_t n_slots = 0;
    elsewhere.assign(layers[layer].n_expert, 0);
    for (size_t i = 0; i < rows.size(); ++i) {
        RemoteRows & r = rows[i];
        std::sort(r.slots.begin(), r.slots.end());
        r.frame = std::make_shared<Frame>(
            make_compute(layer, n_used, layers[layer].n_in, r.slots, experts, weights, inputs, types[i]));
        r.answer = asked[i] ? asked[i]->ask(r.frame, (int) r.slots.size(), layers[layer].n_out) : nullptr;
        n_slots += r.answer ? r.slots.size() : 0;
    }
    const auto computed_here = [&](const RemoteRows & r) {
        return !r.answer &&
            std::none_of(r.slots.begin(), r.slots.end(), [&](int s) { return lacks(layer, experts[s]); });
    };
    rows.erase(std::remove_if(rows.begin(), rows.end(), computed_here), rows.end());
    for (const RemoteRows & r : rows) {
        for (int slot : r.slots) {
            elsewhere[experts[slot]] = 1;
        }
    }
    MutexLock lock(mutex);
    counters.slots += n_slots;
    return rows;
}

bool RemoteBank::wait(int layer, RemoteRows & rows) {
    if (!rows.answer) {
        std::shared_ptr<Peer> peer;
        {
            MutexLock lock(mutex);
            peer = rows.peer < 0 ? nullptr : peers[rows.peer];
        }
        rows.answer = peer ? peer->ask_in_turn(rows.frame, (int) rows.slots.size(), layers[layer].n_out) : nullptr;
        if (rows.answer) {
            MutexLock lock(mutex);
            counters.slots += rows.slots.size();
        }
    }
    return rows.answer && rows.answer->wait();
}

std::vector<RemoteRows> RemoteBank::send_again(int layer, const RemoteRows & lost) {
    const Frame &    frame = *lost.frame;
    const ExpertRows of  = read_compute(frame.data() + sizeof(FrameHeader), frame.size() - sizeof(FrameHeader), layers);
    const auto       now = Clock::now();
    const auto       until  = lost.until == Clock::time_point() ? now + patience : lost.until;
    std::vector<int> failed = lost.failed;
    if (now >= until || (lost.answer && !lost.answer->was_lost())) {
        failed.push_back(lost.peer);
    }
    std::vector<std::vector<int>> slots_of(layers[layer].n_expert);
    std::vector<int>              wanted;
    bool                          needed = false;
    for (int i = 0; i < of.n_slots; ++i) {
        if (slots_of[of.expert[i]].empty()) {
            wanted.push_back(of.expert[i]);
            needed = needed || lacks(layer, of.expert[i]);
        }
        slots_of[of.expert[i]].push_back(i);
    }
    if (!needed) {
        return {};
    }
    std::vector<RemoteRows>       rows;
    std::vector<std::vector<int>> experts_at;
    std::vector<uint8_t>          is_chosen;
    MutexLock                     lock(mutex);
    for (;;) {
        experts_at = choose(layer, wanted, slots_of, failed, is_chosen);
        if (std::all_of(wanted.begin(), wanted.end(), [&](int e) { return is_chosen[e] || !lacks(layer, e); })) {
            break;
        }
        const auto end = placed_at == Clock::time_point() ? until : std::min(until, last_change() + patience);
        if (Clock::now() >= end) {
            return {};
        }
        arrived.wait_until(mutex, end);
    }
    for (size_t peer = 0; peer < experts_at.size(); ++peer) {
        const size_t first = rows.size();
        for (int e : experts_at[peer]) {
            if (rows.size() == first ||
                rows.back().slots.size() + slots_of[e].size() > (size_t) peers[peer]->max_slots()) {
                rows.push_back({ {}, nullptr, nullptr, (int) peer, failed, until });
            }
            rows.back().slots.insert(rows.back().slots.end(), slots_of[e].begin(), slots_of[e].end());
        }
    }
    RemoteRows rest = { {}, nullptr, nullptr, -1, failed, until }; // computed here
    for (int e : wanted) {
        if (!is_chosen[e]) {
            rest.slots.insert(rest.slots.end(), slots_of[e].begin(), slots_of[e].end());
        }
    }
    if (!rest.slots.empty()) {
        rows.push_back(std::move(rest));
    }
    std::vector<float> inputs((size_t) of.n_slots * of.n_in);
    for (int i = 0; i < of.n_slots; ++i) {
        of.copy_inputs(i, &inputs[(size_t) i * of.n_in]);
    }
    for (RemoteRows & r : rows) {
        std::sort(r.slots.begin(), r.slots.end());
        const RowType type = r.peer < 0 ? of.type : peers[r.peer]->config.rows;
        r.frame            = std::make_shared<Frame>(
            make_compute(layer, 1, of.n_in, r.slots, of.expert, of.weight, inputs.data(), type));
        for (int & slot : r.slots) {
            slot = lost.slots[slot];
        }
    }
    return rows;
}

pyorch_remote_counts RemoteBank::counts() {
    MutexLock lock(mutex);
    return counters;
}

void RemoteBank::waited(uint64_t ns, uint64_t n_fallback) {
    MutexLock lock(mutex);
    counters.wait_ns += ns;
    counters.fallback += n_fallback;
}

} // namespace pyorch
