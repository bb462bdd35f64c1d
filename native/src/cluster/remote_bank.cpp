#include "cluster/remote_bank.h"

#include "base/status.h"

#include <algorithm>

namespace pyorch {

RemoteBank::~RemoteBank() {
    std::vector<std::shared_ptr<Peer>> last; // end without the mutex, which their threads may take
    std::lock_guard<std::mutex> lock(mutex);
    last.swap(peers);
    placement.assign(layers.size(), {});
}

void RemoteBank::on_change(Changed to) {
    changed = std::move(to);
}

int RemoteBank::connect(const PeerConfig & config) {
    auto              connected = std::make_shared<Peer>(config, [this] { tell_all(); });
    const std::string why       = connected->wait_joined();
    if (!why.empty()) {
        throw Failure(PYORCH_IO, why);
    }
    std::lock_guard<std::mutex> lock(mutex);
    peers.push_back(std::move(connected));
    return (int) peers.size() - 1;
}

std::shared_ptr<Peer> RemoteBank::peer(int number) {
    std::lock_guard<std::mutex> lock(mutex);
    if (number < 0 || number >= (int) peers.size() || !peers[number]) {
        throw Failure(PYORCH_INVALID, format("there is no server %d", number));
    }
    return peers[number];
}

void RemoteBank::disconnect(int number) {
    std::shared_ptr<Peer> gone = peer(number);
    {
        std::lock_guard<std::mutex> lock(mutex);
        peers[number] = nullptr;
    }
    tell_all();
}

void RemoteBank::place(int layer, const std::vector<int> & to) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (int number : to) {
            if (number < -1 || number >= (int) peers.size() || (number >= 0 && !peers[number])) {
                throw Failure(PYORCH_INVALID, format("there is no server %d", number));
            }
        }
        const auto remote = [](const std::vector<int> & of_layer) {
            return std::any_of(of_layer.begin(), of_layer.end(), [](int number) { return number >= 0; });
        };
        placement[layer] = remote(to) ? to : std::vector<int>();
        is_active = std::any_of(placement.begin(), placement.end(), remote);
    }
    tell(layer);
}

void RemoteBank::mark(int layer, std::vector<uint8_t> & mask) {
    std::lock_guard<std::mutex> lock(mutex);
    const std::vector<int> & of_layer = placement[layer];
    for (size_t e = 0; e < of_layer.size(); ++e) {
        mask[e] |= computes(of_layer[e]);
    }
}

void RemoteBank::tell(int layer) {
    std::lock_guard<std::mutex> telling_lock(telling);
    if (changed) {
        std::vector<uint8_t> elsewhere(layers[layer].n_expert);
        mark(layer, elsewhere);
        changed(layer, elsewhere);
    }
}

void RemoteBank::tell_all() {
    for (int layer = 0; layer < (int) layers.size(); ++layer) {
        tell(layer);
    }
}

std::vector<RemoteRows> RemoteBank::send(int layer, int n_tokens, int n_used, const int32_t * experts,
    const float * weights, const float * inputs, std::vector<uint8_t> & elsewhere) {
    std::vector<std::shared_ptr<Peer>> asked;
    std::vector<RemoteRows>            rows;
    {
        std::lock_guard<std::mutex> lock(mutex);
        const std::vector<int> & of_layer = placement[layer];
        if (of_layer.empty()) {
            return {};
        }
        std::vector<int> place_of(peers.size(), -1); // of a server in asked; -2: it has none
        for (int slot = 0; slot < n_tokens * n_used; ++slot) {
            const int number = of_layer[experts[slot]];
            if (number < 0 || place_of[number] == -2) {
                continue;
            }
            if (place_of[number] == -1) {
                if (!computes(number)) {
                    place_of[number] = -2;
                    continue;
                }
                place_of[number] = (int) asked.size();
                asked.push_back(peers[number]);
                rows.emplace_back();
            }
            rows[place_of[number]].slots.push_back(slot);
        }
    }
    uint64_t n_slots = 0;
    elsewhere.assign(layers[layer].n_expert, 0);
    for (size_t i = 0; i < rows.size(); ++i) {
        RemoteRows & r = rows[i];
        if (r.slots.size() <= (size_t) ExpertRows::MAX_SLOTS) {
            r.frame  = std::make_shared<Frame>(
                make_compute(layer, n_used, layers[layer].n_in, r.slots, experts, weights, inputs));
            r.answer = asked[i]->ask(r.frame, (int) r.slots.size(), layers[layer].n_out);
        }
        if (r.answer) {
            n_slots += r.slots.size();
            for (int slot : r.slots) {
                elsewhere[experts[slot]] = 1;
            }
        }
    }
    rows.erase(std::remove_if(rows.begin(), rows.end(), [](const RemoteRows & r) { return !r.answer; }), rows.end());
    std::lock_guard<std::mutex> lock(mutex);
    counters.slots += n_slots;
    return rows;
}

RemoteCounts RemoteBank::counts() {
    std::lock_guard<std::mutex> lock(mutex);
    return counters;
}

void RemoteBank::waited(uint64_t ns, uint64_t n_fallback) {
    std::lock_guard<std::mutex> lock(mutex);
    counters.wait_ns  += ns;
    counters.fallback += n_fallback;
}

} // namespace pyorch
