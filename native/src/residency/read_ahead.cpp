#include "residency/read_ahead.h"

#include "residency/guesses.h"

#include <algorithm>

namespace pyorch {

void Guesses::replace(const void * context, int layer, std::vector<Guess> guesses) {
    settle(context, layer);
    if (guesses.empty()) {
        return;
    }
    // Of equal ones, the first comes first.
    std::reverse(guesses.begin(), guesses.end());
    std::stable_sort(
        guesses.begin(), guesses.end(), [](const Guess & a, const Guess & b) { return a.probability < b.probability; });
    lists.push_back({ context, layer, std::move(guesses) });
}

void Guesses::settle(const void * context, int layer) {
    lists.erase(std::remove_if(lists.begin(), lists.end(),
                    [&](const List & list) { return list.context == context && list.layer == layer; }),
        lists.end());
}

void Guesses::forget(const void * context) {
    lists.erase(std::remove_if(lists.begin(), lists.end(), [&](const List & list) { return list.context == context; }),
        lists.end());
}

void ReadAhead::want_layer(int layer) {
    prompt.clear();
    if (layer < 0) {
        return;
    }
    const int n = room.capacity_beside_window(layer) - order.n(layer); // more would be evicted before their use
    for (int id = 0; id < residents[layer].n_expert && (int) prompt.size() < n; ++id) {
        Expert & e = residents.expert(layer, id);
        if (e.absent() && !e.elsewhere && !e.above) {
            prompt.push_back(&e);
        }
    }
}

// Starts the first wanted load. A pinned expert gets its memory like a demand. scan: for a prompt.
bool ReadAhead::next(const Locked & locked, std::deque<Expert *> & wanted, bool scan) {
    while (!wanted.empty()) {
        Expert & e = *wanted.front();
        if (!e.absent() || e.holds > 0 || (order.is_full(e.layer) && !e.pinned)) {
            wanted.pop_front(); // resident, or demanded, or one too many
            continue;
        }
        const bool fits = room.make_room(locked, e.layer, 1, e.pinned ? FOR_DEMAND : FOR_ORDER);
        if (!fits || !residents.start_load(e, e.pinned ? ReadFor::DEMAND : scan ? ReadFor::PROMPT : ReadFor::ORDER)) {
            if (residents.n_in_use() > 0 || (e.pinned && !fits && !loads.idle(locked))) {
                return false; // a running layer or a read will free memory
            }
            wanted.pop_front();
            continue;
        }
        wanted.pop_front();
        loads.read_ahead(locked, e.load);
        return true;
    }
    return false;
}

// Whether a forecast is over: made as of layer `from` of a context that has passed its layer since.
bool ReadAhead::has_passed(const void * context, int layer, int from) const {
    const auto passage = passages.find(context);
    if (passage == passages.end()) {
        return false;
    }
    const auto [at, last] = passage->second;
    const int since       = from < 0 ? last : from;
    if (since < 0 || at < 0) {
        return false;
    }
    const int distance = values.layers_between(since, layer);
    return values.layers_between(since, at) >= (distance ? distance : values.n_executed());
}

void ReadAhead::want(const void * context, int layer, int from, std::vector<Want> & wants) {
    const bool         counts = values.is_executed(layer) && !has_passed(context, layer, from);
    std::vector<Guess> wanted;
    for (Want & w : wants) {
        const Expert & e = residents.expert(layer, w.expert);
        w.absent         = e.absent() && !e.elsewhere && !e.above;
        if (w.absent && w.wanted && counts) {
            wanted.push_back({ w.expert, w.probability });
        }
    }
    guesses.replace(context, layer, std::move(wanted));
}

void ReadAhead::expect(const void * context, int layer, int from, const std::vector<float> & probability) {
    if (!has_passed(context, layer, from)) {
        forecast_for[layer] = context;
        values.forecast(layer, probability);
    }
}

void ReadAhead::end_forecast(int layer, const void * context) {
    if (forecast_for[layer] == context) {
        forecast_for[layer] = nullptr;
        values.end_forecast(layer);
    }
}

// A guess for this pass of the context is used now, or was wrong.
void ReadAhead::settle_guessed(const Locked & locked, int layer, const void * context) {
    auto &           l = residents[layer];
    std::vector<int> unsettled;
    unsettled.swap(l.guessed);
    for (int id : unsettled) {
        Expert & e = l.experts[id];
        if (e.guess_of != context && !e.holds) {
            l.guessed.push_back(id);
            continue;
        }
        const double share = e.loading() ? std::min(1.0, (double) e.load.read / (double) l.read_bytes) : 1;
        share_read += (share - share_read) / 50;
        if (!e.holds) {
            residents.seats.counts(layer).prefetch_wasted += e.read_in_vain();
            e.abandoned = e.loading() && !e.pinned;
        }
        e.guess_of = nullptr;
        end_abandoned(locked, e);
        residents.seats.changed(e);
    }
}

void ReadAhead::end_abandoned(const Locked & locked, Expert & e) {
    if (e.abandoned && e.load.in_flight == 0) {
        loads.take_back(locked, e.load);
        residents.drop(e);
    }
}

void ReadAhead::settle(const Locked & locked, const void * context, int layer) {
    Passage & passage = passages[context];
    passage.at        = layer;
    passage.last      = std::max(passage.last, layer);
    guesses.settle(context, layer);
    settle_guessed(locked, layer, context);
    end_forecast(layer, context);
}

void ReadAhead::forget(const Locked & locked, const void * context) {
    guesses.forget(context);
    passages.erase(context);
    for (int layer = 0; layer < residents.n_layers(); ++layer) {
        settle_guessed(locked, layer, context);
        end_forecast(layer, context);
    }
}

// Reads the best guess: the highest probability over distance (FineMoE, section 4.5; there, the probability is that of
// the map found; here, the share of such guesses that came true).
bool ReadAhead::next_guess(const Locked & locked) {
    while (!guesses.empty()) {
        const auto [context, layer, guess] = guesses.take_best([&](const void * context, int layer) {
            const auto passage = passages.find(context);
            return passage == passages.end() ? 1 : std::max(1, values.layers_between(passage->second.at, layer));
        });
        Expert & e                         = residents.expert(layer, guess.expert);
        if (!e.absent() || e.above || e.holds > 0 || order.is_full(layer)) {
            continue;
        }
        const float probability = values.probability(layer)[e.id];
        if (!room.make_room(locked, layer, 1, FOR_GUESS, probability > 0 ? probability : INFINITY) ||
            !residents.start_load(e, ReadFor::GUESS)) {
            continue;
        }
        residents.guess_for(e, context);
        loads.guess(locked, e.load);
        return true;
    }
    return false;
}

void ReadAhead::defer(int layer, const std::vector<int> & experts) {
    deferred.erase(std::remove_if(deferred.begin(), deferred.end(), [&](Expert * e) { return e->layer == layer; }),
        deferred.end());
    for (int id : experts) {
        deferred.push_back(&residents.expert(layer, id));
    }
}

// Reads an expert that was replaced. Otherwise it would stay absent, since no layer demands it.
bool ReadAhead::next_deferred(const Locked & locked) {
    while (!deferred.empty()) {
        Expert & e = *deferred.front();
        deferred.pop_front();
        if (!e.absent() || e.elsewhere || e.holds > 0 || order.is_full(e.layer)) {
            continue;
        }
        const Victim gain = { e.layer, e.id, 1, values.worth(e.layer, values.value(e.layer, e.id)) };
        if (room.make_room(locked, e.layer, 1, FOR_GUESS, INFINITY, gain) &&
            residents.start_load(e, ReadFor::DEFERRED)) {
            loads.guess(locked, e.load);
            return true;
        }
    }
    return false;
}

} // namespace pyorch
