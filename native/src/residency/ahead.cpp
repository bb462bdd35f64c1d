// What is read ahead, and what becomes of a load.

#include "residency/table.h"

#include <algorithm>

namespace pyorch {

void Table::set_executed(const std::vector<int> & executed) {
    std::lock_guard<std::mutex> lock(mutex);
    values.set_executed(executed);
}

void Table::set_elsewhere(int layer, const std::vector<uint8_t> & elsewhere) {
    std::lock_guard<std::mutex> lock(mutex);
    for (int id = 0; id < layers[layer].n_expert; ++id) {
        layers[layer].experts[id].elsewhere = elsewhere[id];
    }
}

void Table::set_above(int layer, const std::vector<uint8_t> & there) {
    std::lock_guard<std::mutex> lock(mutex);
    for (int id = 0; id < layers[layer].n_expert; ++id) {
        Expert & e = layers[layer].experts[id];
        if (e.above != (there[id] != 0)) {
            e.above = there[id] != 0;
            changed(e);
        }
    }
}

void Table::want_layer_ahead(int layer) {
    prompt.clear();
    if (layer < 0) {
        return;
    }
    Layer &   l = layers[layer];
    const int n = capacity_beside_window(layer) - order.n(layer); // more of them would go again before they are needed
    for (int id = 0; id < l.n_expert && (int) prompt.size() < n; ++id) {
        if (l.experts[id].absent() && !l.experts[id].elsewhere && !l.experts[id].above) {
            prompt.push_back(&l.experts[id]);
        }
    }
}

// Starts the load of the first that is wanted, if there is memory for it. What is pinned gets it like a demand.
// scan: for a prompt.
bool Table::next_ahead(std::deque<Expert *> & wanted, bool scan) {
    while (!wanted.empty()) {
        Expert & e = *wanted.front();
        if (!e.absent() || e.in_use > 0 || (order.n(e.layer()) >= values.max(e.layer()) && !e.pinned)) {
            wanted.pop_front(); // there, or demanded, or one too many
            continue;
        }
        const bool fits = make_room(e.layer(), 1, e.pinned ? FOR_DEMAND : FOR_ORDER, INFINITY);
        if (!fits || !start_load(e, e.pinned ? ReadFor::DEMAND : scan ? ReadFor::PROMPT : ReadFor::ORDER)) {
            if (n_in_use > 0 || (e.pinned && !fits && !loads.idle())) {
                return false; // a running layer or a read will let go of memory
            }
            wanted.pop_front();
            continue;
        }
        wanted.pop_front();
        loads.read_ahead(e.load);
        return true;
    }
    return false;
}

// Whether the pass of a context that a forecast is of has come, if it was made when the context's layer `from` came.
bool Table::has_passed(const void * context, int layer, int from) {
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

void Table::want(const void * context, int layer, int from, std::vector<Want> & wants) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        const bool                  counts = values.is_executed(layer) && !has_passed(context, layer, from);
        std::vector<Guess>          wanted;
        for (Want & w : wants) {
            const Expert & e = layers[layer].experts[w.expert];
            w.absent         = e.absent() && !e.elsewhere && !e.above;
            if (w.absent && w.wanted && counts) {
                wanted.push_back({ w.expert, w.probability });
            }
        }
        guesses.replace(context, layer, std::move(wanted));
    }
    loads.wake();
}

void Table::expect(const void * context, int layer, int from, const std::vector<float> & probability) {
    std::lock_guard<std::mutex> lock(mutex);
    if (has_passed(context, layer, from)) {
        return;
    }
    layers[layer].forecast_for = context;
    values.forecast(layer, probability);
}

void Table::foresee(int layer, int expert, uint64_t next_use) {
    std::lock_guard<std::mutex> lock(mutex);
    values.foresee(layer, expert, next_use);
}

void Table::end_forecast(int layer) {
    layers[layer].forecast_for = nullptr;
    values.end_forecast(layer);
}

// What was read for this pass of the context is in use now, or was read in vain.
void Table::settle_guessed(Layer & l, const void * context) {
    std::vector<int> unsettled;
    unsettled.swap(l.guessed);
    for (int id : unsettled) {
        Expert & e = l.experts[id];
        if (e.guessed_for != context && !e.in_use) {
            l.guessed.push_back(id);
            continue;
        }
        const double share = e.loading() ? std::min(1.0, (double) e.load.read / (double) l.read_bytes) : 1;
        read_share += (share - read_share) / 50;
        if (!e.in_use) {
            l.stats.prefetch_wasted += e.read_in_vain();
            e.state = e.loading() && !e.pinned ? State::ABANDONED : e.state;
        }
        e.guessed_for = nullptr;
        end_unwanted(e);
        changed(e);
    }
}

// What is not wanted any more ends, unless a reader works on it: then it ends with that request.
void Table::end_unwanted(Expert & e) {
    if (e.state == State::ABANDONED && e.load.in_flight == 0) {
        loads.take_back(e.load);
        drop(e);
    }
}

// A context comes to a layer: what was guessed for it was right, or in vain, or is not wanted any more.
void Table::settle(const void * context, int layer) {
    Passage & passage = passages[context];
    passage.at        = layer;
    passage.last      = std::max(passage.last, layer);
    guesses.settle(context, layer);
    Layer & l = layers[layer];
    settle_guessed(l, context);
    if (l.forecast_for == context) {
        end_forecast(layer);
    }
}

// Starts the load of the best guess, if memory can be had for it: that with the highest probability over distance
// (FineMoE section 4.5; there, the probability is that of the map found, here how often such guesses came true).
bool Table::next_guess() {
    while (!guesses.empty()) {
        const auto [context, layer, guess] = guesses.take_best([&](const void * context, int layer) {
            const auto passage = passages.find(context);
            return passage == passages.end() ? 1 : std::max(1, values.layers_between(passage->second.at, layer));
        });
        Layer &  l                         = layers[layer];
        Expert & e                         = l.experts[guess.expert];
        if (!e.absent() || e.above || e.in_use > 0 || order.n(layer) >= values.max(layer)) {
            continue;
        }
        const float probability = values.probability(layer)[e.id()];
        if (!make_room(layer, 1, FOR_GUESS, probability > 0 ? probability : INFINITY) ||
            !start_load(e, ReadFor::GUESS)) {
            continue;
        }
        e.guessed_for = context;
        l.guessed.push_back(e.id());
        loads.guess(e.load);
        return true;
    }
    return false;
}

void Table::defer(int layer, const std::vector<int> & experts) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        deferred.erase(
            std::remove_if(deferred.begin(), deferred.end(), [&](Expert * e) { return e->layer() == layer; }),
            deferred.end());
        for (int id : experts) {
            deferred.push_back(&layers[layer].experts[id]);
        }
    }
    loads.wake();
}

// Starts the load of an expert that others stood in for. Otherwise what is absent would stay so: nobody demands it.
bool Table::next_deferred() {
    while (!deferred.empty()) {
        Expert & e = *deferred.front();
        deferred.pop_front();
        if (!e.absent() || e.in_use > 0 || order.n(e.layer()) >= values.max(e.layer())) {
            continue;
        }
        const Victim gain = { e.layer(), e.id(), 1, values.worth(e.layer(), values.value(e.layer(), e.id())) };
        if (make_room(e.layer(), 1, FOR_GUESS, INFINITY, gain) && start_load(e, ReadFor::DEFERRED)) {
            loads.guess(e.load);
            return true;
        }
    }
    return false;
}

bool Table::is_idle() const {
    return loads.idle() && ordered.empty() && prompt.empty() && guesses.empty() && deferred.empty();
}

bool Table::order_ahead() { return !layer_waits() && (next_ahead(ordered, false) || next_ahead(prompt, true)); }

bool Table::order_guess() {
    const bool did = !layer_waits() && (next_guess() || next_deferred());
    if (!did && is_idle()) {
        idle.notify_all();
    }
    return did;
}

void Table::published(Load & load, int role, const char * address) {
    if (load.stream) {
        load.stream->frame_of(load).address = address;
        return;
    }
    Expert & e   = expert_of(load);
    e.addr[role] = address;
    e.ready.fetch_or(1u << role, std::memory_order_release);
}

void Table::failed(Load & load, const std::string & sentence) {
    error = sentence;
    if (load.stream) {
        load.stream->error = sentence;
        return;
    }
    expert_of(load).error = sentence;
    expert_of(load).ready.fetch_or(Expert::FAILED, std::memory_order_release);
}

void Table::finished(Load & load) {
    const bool lets_go = load.in_flight == 0;
    if (load.stream) {
        passed_by(load);
    } else {
        expert_finished(expert_of(load));
    }
    keep_budget();
    if (lets_go) {
        space.notify_all();
        loads.wake(); // a reader sleeps where a decode thread ends this: there may be memory now for what waits
    }
    if (n_waiting > 0) {
        arrived.notify_all();
    }
    if (is_idle()) {
        idle.notify_all();
    }
}

// Who waits for a matrix decodes meanwhile.
void Table::decodable() {
    if (n_waiting > 0) {
        arrived.notify_all();
    }
    idle.notify_all(); // wait_idle()
}

void Table::expert_finished(Expert & e) {
    Load &     load       = e.load;
    Layer &    l          = layer_of(e);
    const bool compressed = is_compressed(map.layers[e.layer()]);
    if (load.ended() && load.failed && compressed) {
        keep_parts(e, Form::ABSENT); // others may wait for that memory
    }
    if (load.ended() && !load.failed) {
        e.state               = State::RESIDENT;
        load.form             = Form::ABSENT;
        l.is_resident[e.id()] = 1;
        ++l.n_resident;
        ++l.stats.loads;
        l.stats.prefetch_loads += e.unasked(); // a layer that came to need it meanwhile has counted it
        changed(e);
        if (compressed) {
            load.there = load.damaged ? 0 : STORED_PARTS;
            unstage(load);
            settle_parts(e);
        }
    } else if (load.ended() && e.in_use == 0) {
        drop(e);
    } else {
        end_unwanted(e);
    }
}

} // namespace pyorch
