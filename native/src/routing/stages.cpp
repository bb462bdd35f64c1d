#include "routing/stages.h"

#include "base/callback.h"
#include "routing/device_tier.h"

#include <algorithm>
#include <iterator>

namespace pyorch {

namespace {

void observe(Context & context, RoutedBatch & batch) {
    context.routing.activations.count(batch.layer, batch.requested, batch.n_tokens * batch.n_used);
    Observer & observer = context.routing.observer;
    MutexLock  lock(observer.mutex);
    if (!observer.function || !batch.has(GRAPH_ALL)) { // the observer was set after the graph was built
        return;
    }
    pyorch_routing routing;
    routing.context       = context.id;
    routing.il            = batch.il;
    routing.decode        = batch.decode;
    routing.n_tokens      = batch.n_tokens;
    routing.n_expert      = batch.n_expert;
    routing.n_expert_used = batch.n_used;
    routing.n_embd        = batch.n_state;
    routing.experts       = batch.requested;
    routing.weights       = batch.requested_weights;
    routing.probs         = batch.probs;
    routing.logits        = batch.logits;
    routing.inputs        = batch.states;
    routing.residuals     = batch.residuals;
    CallbackScope scope;
    observer.function(observer.user, &routing);
}

// Whether a ubatch computes forecasts. It needs a predictor that makes them.
bool speculative(const Routing & routing, const RoutedBatch & batch) {
    return routing.speculation.active(batch.decode) && routing.prefetcher.active();
}

void speculate(Context & context, RoutedBatch & batch) {
    Routing & routing = context.routing;
    if (!batch.has(GRAPH_ALL) || !speculative(routing, batch)) {
        return;
    }
    const bool first     = batch.layer == context.layers.front();
    const auto forecasts = first ? std::vector<Forecast>() : routing.prefetcher.next_forecasts(context.id, batch.layer);
    if (routing.substitutions.active(batch.layer, batch.decode)) {
        routing.speculation.mark(batch, forecasts);
    } else {
        routing.speculation.apply(batch, forecasts);
    }
}

// Slots of ghosts and omitted slots need no computing: they get the number of an expert that no other slot names, if
// rows of the layer are independent and there is such an expert. Otherwise they get a resident expert, whose result is
// not used.
void vacate(RoutedBatch & batch, const std::vector<uint8_t> & resident) {
    if (batch.ghosts.empty() && batch.dropped.empty()) {
        return;
    }
    thread_local std::vector<int> vacant;
    vacant.clear();
    std::merge(batch.ghosts.begin(), batch.ghosts.end(), batch.dropped.begin(), batch.dropped.end(),
        std::back_inserter(vacant));
    thread_local std::vector<uint8_t> named;
    named.assign(batch.n_expert, 0);
    auto next = vacant.begin();
    for (int s = 0; s < batch.n_tokens * batch.n_used; ++s) {
        if (next != vacant.end() && *next == s) {
            ++next;
        } else {
            named[batch.experts[s]] = 1;
        }
    }
    const auto unnamed = std::find(named.begin(), named.end(), 0);
    int        id      = -1;
    if (batch.portable && unnamed != named.end()) {
        id = batch.hole = (int) (unnamed - named.begin());
    } else {
        const auto first = [](const std::vector<uint8_t> & flags) {
            const auto found = std::find_if(flags.begin(), flags.end(), [](uint8_t flag) { return flag != 0; });
            return found != flags.end() ? (int) (found - flags.begin()) : -1;
        };
        const int computed = first(named);
        id                 = computed >= 0 ? computed : first(resident);
    }
    for (int s : vacant) {
        batch.experts[s] = id >= 0 ? id : batch.experts[s];
    }
}

void substitute(Context & context, RoutedBatch & batch) {
    Routing & routing = context.routing;
    // Calibration needs the experts that routers choose, and their own outputs. Without a forecast a layer waits,
    // whether forecasts are executed or not.
    if (!batch.has(GRAPH_CHANGES) || !routing.substitutions.active(batch.layer, batch.decode) ||
        routing.calibration.active() || (speculative(routing, batch) && batch.guessed.empty())) {
        return;
    }
    thread_local std::vector<uint8_t> resident, loading;
    if (routing.simulated_cache) {
        routing.simulated_cache->look(batch.layer, resident, loading);
    } else {
        routing.table.resident(batch.layer, resident, &loading);
    }
    // 1 + the hops from the memory that the layer computes from: its device if it has one, host memory, another server.
    thread_local std::vector<uint8_t> there;
    if (batch.on_device()) {
        there.assign(batch.n_expert, 0);
        routing.device->mark(batch.layer, there);
        std::transform(resident.begin(), resident.end(), there.begin(), resident.begin(),
            [](uint8_t in_memory, uint8_t on_device) { return on_device ? 1 :
                                                           in_memory    ? 2 :
                                                                          0; });
    }
    if (routing.remote.active() && batch.portable) {
        there.assign(batch.n_expert, 0);
        routing.remote.mark(batch.layer, there);
        std::transform(
            resident.begin(), resident.end(), there.begin(), resident.begin(), [&](uint8_t here, uint8_t at_peer) {
                return here ? here : at_peer ? 2 + batch.on_device() : 0;
            });
    }
    batch.changed = context.changed_of(batch.n_tokens);
    routing.substitutions.apply(
        batch, resident.data(), loading.data(), routing.table.map.layers[batch.layer].expert_bytes());
    vacate(batch, resident);
}

void place(Context & context, RoutedBatch & batch) {
    RemoteBank & remote = context.routing.remote;
    if (batch.layer == context.layers.front()) {
        context.tries = remote.take_trial();
    }
    if (context.tries) {
        const MoeLayer & layer = context.routing.table.map.layers[batch.layer];
        for (int s = 0; s < batch.n_tokens * batch.n_used; ++s) {
            batch.experts[s] = layer.lacks(batch.experts[s]) ? layer.first_there() : batch.experts[s];
        }
    }
    if (batch.has(GRAPH_ALL) && remote.active() && batch.portable) {
        thread_local std::vector<uint8_t> resident; // remote experts need no read here
        context.routing.table.resident(batch.layer, resident);
        if (batch.on_device()) {
            context.routing.device->mark(batch.layer, resident);
        }
        if (batch.hole >= 0) {
            resident[batch.hole] = 1; // no server is asked for it
        }
        ReadCost read;
        if (remote.reads_allowed()) {
            context.routing.table.read_time(batch.layer, read.queued, read.expert, read.busy);
        }
        batch.remote = remote.send(batch.layer, batch.n_tokens, batch.n_used, batch.experts, batch.weights,
            batch.inputs, resident, read, batch.elsewhere);
    }
}

// Returns the experts of all slots that this server handles, ascending, each once, except `hole`.
std::vector<int> distinct(const RoutedBatch & batch, const int32_t * slots, int hole = -1) {
    thread_local std::vector<uint8_t> named;
    named.assign(batch.n_expert, 0);
    for (int s = 0; s < batch.n_tokens * batch.n_used; ++s) {
        named[slots[s]] = 1;
    }
    std::vector<int> experts;
    for (int e = 0; e < batch.n_expert; ++e) {
        if (named[e] && e != hole && (batch.elsewhere.empty() || !batch.elsewhere[e])) {
            experts.push_back(e);
        }
    }
    return experts;
}

// Experts in a device's slots are not requested from host memory, and their uses do not count there: host memory keeps
// no copy unless it has room. Experts uploaded ahead come from host memory.
void offload(Context & context, RoutedBatch & batch) {
    batch.wanted = distinct(batch, batch.experts, batch.hole);
    batch.asked  = distinct(batch, batch.requested);
    if (batch.alone() || (batch.on_device() && !context.routing.calibration.active())) {
        if (context.routing.device->takes_forecasts()) { // the layer's forecasts are complete then
            context.routing.prefetcher.settle(context.id);
        }
        context.routing.device->choose(
            context.on_device, batch, { context.id, batch.layer, context.continues, batch.asked });
    } else if (context.routing.device) {
        context.routing.device->forget(context.id, batch.layer);
        if (batch.layer == context.layers.back()) { // the last layer of a prompt that had the areas until here
            context.routing.device->release(context.on_device);
        }
    }
}

void replace(Context & context, RoutedBatch & batch) {
    if (batch.overlaps() && !batch.device.slots.empty()) {
        context.routing.device->replace(batch, { context.id, batch.layer, context.continues, batch.asked });
    }
}

// Returns for each of some experts, ascending, the slots of the ubatch that name it.
static std::vector<int> rows_of(const RoutedBatch & batch, const std::vector<int> & experts) {
    std::vector<int> rows(experts.size());
    for (int i = 0; i < batch.n_tokens * batch.n_used; ++i) {
        const auto expert = std::lower_bound(experts.begin(), experts.end(), batch.experts[i]);
        if (expert != experts.end() && *expert == batch.experts[i]) {
            ++rows[(size_t) (expert - experts.begin())];
        }
    }
    return rows;
}

void acquire(Context & context, RoutedBatch & batch) {
    std::vector<int> experts = batch.wanted;
    std::vector<int> asked   = batch.asked;
    experts.erase(
        std::remove_if(experts.begin(), experts.end(), [&](int e) { return batch.device.computes(e); }), experts.end());
    asked.erase(std::remove_if(asked.begin(), asked.end(), [&](int e) { return batch.device.keeps(e); }), asked.end());
    if (context.routing.simulated_cache) {
        context.routing.simulated_cache->pass(
            context.id, batch.layer, { experts, asked, batch.n_tokens, context.continues }, batch.deferred);
    }
    Table & table = context.routing.table;
    table.acquire(context.owner, batch.layer,
        { experts, asked, batch.n_tokens, context.continues, true, !batch.device.slots.empty(), true,
            table.orders_by_rows(batch.layer) ? rows_of(batch, experts) : std::vector<int>() });
    if (!batch.deferred.empty()) {
        table.defer(batch.layer, batch.deferred);
    }
}

// Copies the predictors' data, because they run while the graph computes on.
void predict(Context & context, RoutedBatch & batch) {
    Prefetcher &   prefetcher = context.routing.prefetcher;
    const unsigned needs      = prefetcher.needs();
    const bool     speculates = speculative(context.routing, batch);
    const bool     predicts   = (batch.decode || (needs & PYORCH_NEEDS_ROUTERS)) &&
        is_predicted(batch.n_tokens, batch.n_used, batch.n_expert) && prefetcher.wants();
    if (!speculates && !predicts) {
        return;
    }
    const bool states = (needs & PYORCH_NEEDS_STATES) != 0;
    if (!batch.weights || (states && !batch.states && !batch.residuals) ||
        ((needs & PYORCH_NEEDS_DISTRIBUTIONS) && !batch.probs)) {
        return; // the predictor was set after the graph was built
    }
    const size_t n_slots = (size_t) batch.n_tokens * batch.n_used;
    const size_t n_state = (size_t) batch.n_tokens * batch.n_state;
    const size_t n_probs = (size_t) batch.n_tokens * batch.n_expert;

    RoutedLayer layer;
    layer.layer    = batch.layer;
    layer.n_tokens = batch.n_tokens;
    layer.n_used   = batch.n_used;
    layer.decode   = batch.decode;
    layer.experts.assign(batch.requested, batch.requested + n_slots);
    layer.computed.assign(batch.experts, batch.experts + n_slots);
    for (int s : batch.ghosts) {
        layer.computed[s] = batch.requested[s];
    }
    layer.weights.assign(batch.weights, batch.weights + n_slots);
    if (states && batch.residuals) {
        layer.residuals.assign(batch.residuals, batch.residuals + n_state);
    } else if (states) {
        layer.inputs.assign(batch.states, batch.states + n_state);
    }
    if (needs & PYORCH_NEEDS_DISTRIBUTIONS) {
        layer.probs.assign(batch.probs, batch.probs + n_probs);
        for (size_t row = 0; row < n_probs; row += batch.n_expert) {
            make_distribution(batch.softmax_selected ? PYORCH_GATING_SOFTMAX_SELECTED : PYORCH_GATING_SOFTMAX,
                layer.probs.data() + row, batch.n_expert);
        }
    }
    prefetcher.routed(context.id, std::move(layer));
}

void upload(Context & context, RoutedBatch & batch) {
    if (!batch.device.slots.empty()) {
        const size_t next = batch.layer + 1; // its graph is built by now
        context.routing.device->bring(context.owner, context.on_device, batch,
            2 * next < context.graph.size() && context.at((int) next, batch.decode).batch.through_area());
    }
}

using Stage = void (*)(Context & context, RoutedBatch & batch);

constexpr Stage BEFORE_DEVICE[] = { observe, speculate, substitute, place, offload };
constexpr Stage BESIDE_DEVICE[] = { replace, acquire, predict, upload };

} // namespace

void run_stages(Context & context, RoutedBatch & batch) {
    for (Stage stage : BEFORE_DEVICE) {
        stage(context, batch);
    }
    if (!batch.overlaps()) {
        run_stages_beside(context, batch);
    }
}

void run_stages_beside(Context & context, RoutedBatch & batch) {
    for (Stage stage : BESIDE_DEVICE) {
        stage(context, batch);
    }
}

} // namespace pyorch
