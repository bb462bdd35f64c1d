#include "residency/stream.h"

#include "base/status.h"

#include <algorithm>
#include <numeric>

namespace pyorch {

Stream::Frame & Stream::frame_of(const Load & load) {
    return *std::find_if(frames.begin(), frames.end(), [&](const Frame & frame) { return &frame.load == &load; });
}

bool Stream::ask(int role, int place, const void * thread, int n_threads) {
    bool as_thought = true;
    if (pass < 0 || roles[pass] != role) {
        ++pass;
        if (pass == (int) roles.size() || roles[pass] != role) {
            const auto later = std::find(roles.begin() + pass, roles.end(), role);
            if (later != roles.end()) {
                std::rotate(roles.begin() + pass, later, later + 1);
            } else {
                roles.insert(roles.begin() + pass, role);
            }
            as_thought = false;
        }
        reached.clear();
        passed = number(0);
    }
    auto mine = std::find_if(reached.begin(), reached.end(), [&](const auto & each) { return each.first == thread; });
    if (mine == reached.end()) {
        mine = reached.insert(mine, { thread, place });
    }
    mine->second = std::max(mine->second, place);
    if ((int) reached.size() == n_threads) { // otherwise some threads have not begun
        int last = place;
        for (const auto & each : reached) {
            last = std::min(last, each.second);
        }
        passed = std::max(passed, number(last));
    }
    return as_thought;
}

Streams::Streams(Residents & residents, Loader & loads) : residents(residents), loads(loads) {
    for (const MoeLayer & layer : map.layers) {
        passes.emplace_back(layer.tensors.size());
        std::iota(passes.back().begin(), passes.back().end(), 0);
    }
}

void Streams::open(const Locked & locked, Owner & owner, int layer, const std::vector<int> & experts, int window) {
    auto s     = std::make_unique<Stream>();
    s->layer   = layer;
    s->experts = experts;
    s->roles   = passes[layer];
    s->place_of.assign(residents[layer].n_expert, -1);
    for (size_t i = 0; i < experts.size(); ++i) {
        s->place_of[experts[i]] = (int) i;
    }
    s->frames = std::vector<Stream::Frame>(std::min<int64_t>(window, s->n_matrices()));
    for (Stream::Frame & frame : s->frames) {
        frame.load.layer  = layer;
        frame.load.slot   = bank.take(residents[layer].size_class);
        frame.load.stream = s.get();
        if (!frame.load.slot) {
            s->error = format("out of memory for experts of layer %d", map.layers[layer].il);
        }
    }
    residents.hold_window();
    owner.stream = s.get();
    streams.push_back(std::move(s));
    fill(locked, *owner.stream);
}

// Begins the reads for which the window has room.
void Streams::fill(const Locked & locked, Stream & s) {
    std::vector<Load *> started;
    while (s.error.empty() && s.begun < std::min(s.n_matrices(), s.passed + (int64_t) s.frames.size())) {
        Stream::Frame & frame = s.frame(s.begun);
        if (!frame.load.ended()) {
            break; // an unwanted read is running; its end calls fill() again
        }
        frame.number      = s.begun;
        frame.address     = nullptr;
        frame.load.expert = s.experts[s.begun % s.experts.size()];
        frame.load.roles  = 1u << s.roles[s.begun / s.experts.size()];
        started.push_back(&frame.load);
        ++s.begun;
    }
    if (!started.empty()) {
        loads.demand(locked, started, {});
        loads.wake();
    }
}

int64_t Streams::ask(const Locked & locked, Stream & s, int expert, int role, const void * thread, int n_threads) {
    const int place = s.place_of[expert];
    if (!s.ask(role, place, thread, n_threads)) {
        passes[s.layer] = s.roles;
        s.begun         = s.passed;
        for (Stream::Frame & frame : s.frames) {
            loads.take_back(locked, frame.load);
            if (frame.load.ended()) {
                residents.unstage(frame.load);
            }
            frame.number = -1;
        }
    }
    fill(locked, s);
    return s.number(place);
}

void Streams::finished(const Locked & locked, Load & load) {
    Stream & s = *load.stream;
    if (!load.ended()) {
        return;
    }
    residents.unstage(load);
    if (!s.closed) {
        residents.seats.counts(s.layer).loads += !load.failed && load.roles == 1u << s.roles.back();
        fill(locked, s);
    } else {
        give_frames(s); // and frees the load
    }
}

// Frees the slots of a closed stream, except while a reader works on them. The stream ends with its last slot.
void Streams::give_frames(Stream & s) {
    bool any = false;
    for (Stream::Frame & frame : s.frames) {
        if (frame.load.slot && frame.load.ended()) {
            residents.unstage(frame.load);
            bank.give(frame.load.slot);
            frame.load.slot = {};
        }
        any |= (bool) frame.load.slot;
    }
    if (!any) {
        streams.erase(
            std::find_if(streams.begin(), streams.end(), [&](const auto & each) { return each.get() == &s; }));
    }
}

void Streams::close(const Locked & locked, Owner & owner) {
    Stream & s   = *owner.stream;
    owner.stream = nullptr;
    s.closed     = true;
    residents.unhold_window();
    for (Stream::Frame & frame : s.frames) {
        loads.take_back(locked, frame.load);
    }
    give_frames(s);
}

} // namespace pyorch
