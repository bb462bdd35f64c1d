// Layers that do not fit into memory whole: see stream.h.

#include "residency/stream.h"

#include "residency/table.h"

#include <algorithm>

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
    if ((int) reached.size() == n_threads) { // else some have not begun
        int last = place;
        for (const auto & each : reached) {
            last = std::min(last, each.second);
        }
        passed = std::max(passed, number(last));
    }
    return as_thought;
}

// Slots of the smallest budget that the layer can be computed with, beside what is reserved.
int Table::window(int layer) const { return map.floor_experts(map.layers[layer]); }

// Experts of a layer that can be in memory at once, beside what is reserved in the others.
int Table::capacity(int layer) const {
    const Layer &  l      = layers[layer];
    const uint64_t others = reserved_bytes - std::max(values.min(layer), l.n_pinned) * l.slot_bytes;
    return (int) std::min<uint64_t>(l.n_expert, (bank->matrices_budget() - others) / l.slot_bytes);
}

// The same, beside its own window: those that eviction may not take included.
int Table::capacity_beside_window(int layer) const {
    const int n = capacity(layer);
    return n == layers[layer].n_expert ? n : n - window(layer);
}

// REQUIRES: room for the window
void Table::open_stream(Owner & owner, int layer, const std::vector<int> & experts) {
    Layer & l  = layers[layer];
    auto    s  = std::make_unique<Stream>();
    s->layer   = layer;
    s->experts = experts;
    s->roles   = l.passes;
    s->place_of.assign(l.n_expert, -1);
    for (size_t i = 0; i < experts.size(); ++i) {
        s->place_of[experts[i]] = (int) i;
    }
    s->frames = std::vector<Stream::Frame>(std::min<int64_t>(window(layer), s->n_matrices()));
    for (Stream::Frame & frame : s->frames) {
        frame.load.layer  = layer;
        frame.load.slot   = bank->take(l.size_class);
        frame.load.stream = s.get();
        if (!frame.load.slot) {
            s->error = error = format("out of memory for experts of layer %d", map.layers[layer].il);
        }
    }
    ++n_in_use;
    owner.stream = s.get();
    streams.push_back(std::move(s));
    fill(*owner.stream);
}

// Begins to read what the window has room for.
void Table::fill(Stream & s) {
    std::vector<Load *> started;
    while (s.error.empty() && s.begun < std::min(s.n_matrices(), s.passed + (int64_t) s.frames.size())) {
        Stream::Frame & frame = s.frame(s.begun);
        if (!frame.load.ended()) {
            break; // of what is not wanted any more; its end comes here again
        }
        frame.number      = s.begun;
        frame.address     = nullptr;
        frame.load.form   = COMPUTABLE;
        frame.load.expert = s.experts[s.begun % s.experts.size()];
        frame.load.roles  = 1u << s.roles[s.begun / s.experts.size()];
        started.push_back(&frame.load);
        ++s.begun;
    }
    if (!started.empty()) {
        loads.demand(started, {});
        loads.wake();
    }
}

const char * Table::pass_by(Stream & s, int expert, int role, bool wait, const void * thread, int n_threads) {
    std::unique_lock<std::mutex> lock(mutex);
    const int                    place = s.place_of[expert];
    if (!s.ask(role, place, thread, n_threads)) {
        layers[s.layer].passes = s.roles;
        s.begun                = s.passed;
        for (Stream::Frame & frame : s.frames) {
            loads.take_back(frame.load);
            if (frame.load.ended()) {
                unstage(frame.load);
            }
            frame.number = -1;
        }
    }
    fill(s);
    const int64_t   number = s.number(place);
    Stream::Frame & frame  = s.frame(number);
    auto            there  = [&] { return frame.number == number && frame.address; };
    if (!there() && s.error.empty()) {
        if (!wait) {
            return nullptr;
        }
        wait_for_arrival(lock, s.layer, [&] { return there() || !s.error.empty(); });
    }
    return there() ? frame.address : zeros;
}

// A read of a window came to its end.
void Table::passed_by(Load & load) {
    Stream & s = *load.stream;
    if (!load.ended()) {
        return;
    }
    unstage(load);
    if (!s.closed) {
        layers[s.layer].stats.loads += !load.failed && load.roles == 1u << s.roles.back();
        fill(s);
    } else {
        give_frames(s); // and the load goes with them
    }
}

// Of a stream that is closed: its slots, but for those that a reader works on. With the last one it goes.
void Table::give_frames(Stream & s) {
    bool any = false;
    for (Stream::Frame & frame : s.frames) {
        if (frame.load.slot && frame.load.ended()) {
            unstage(frame.load);
            bank->give(frame.load.slot);
            frame.load.slot = {};
        }
        any |= (bool) frame.load.slot;
    }
    if (!any) {
        streams.erase(
            std::find_if(streams.begin(), streams.end(), [&](const auto & each) { return each.get() == &s; }));
    }
}

void Table::close_stream(Owner & owner) {
    Stream & s   = *owner.stream;
    owner.stream = nullptr;
    s.closed     = true;
    --n_in_use;
    for (Stream::Frame & frame : s.frames) {
        loads.take_back(frame.load);
    }
    give_frames(s);
}

} // namespace pyorch
