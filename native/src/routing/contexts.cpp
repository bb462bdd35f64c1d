#include "routing/contexts.h"

#include "routing/device_tier.h"

#include <algorithm>
#include <map>

namespace pyorch {

namespace {

Mutex                                            mutex;
std::map<const void *, std::unique_ptr<Context>> contexts GUARDED_BY(mutex);

} // namespace

Context::Context(const void * id, Routing & routing) :
        id(id), routing(routing), owner{ id }, needs{ graph_needs(routing, false), graph_needs(routing, true) } {
    for (const MoeLayer & layer : routing.table.map.layers) {
        for (const bool decode : { false, true }) {
            GraphLayer at     = { this };
            at.batch.layer    = (int) graph.size() / 2;
            at.batch.il       = layer.il;
            at.batch.decode   = decode;
            at.batch.n_expert = layer.n_expert;
            graph.push_back(std::move(at));
        }
    }
}

bool Context::look_at_needs(int n_tokens, bool decode) {
    const std::array<unsigned, 2> built     = needs;
    const bool                    is_prompt = routing.device && routing.device->has_areas_for(n_tokens, decode);
    const unsigned                others    = !is_prompt ? built[0] & GRAPH_OTHERS :
        routing.device->take_areas(on_device)            ? 0 :
                                                           GRAPH_OTHERS;
    needs = { (graph_needs(routing, false) & ~(unsigned) GRAPH_OTHERS) | others, graph_needs(routing, true) };
    return needs != built;
}

void Context::count_unasked(int n_tokens, bool decode) {
    uint64_t n = 0;
    for (const GraphLayer & layer : graph) {
        if (!layer.unasked || layer.batch.decode != decode) {
            continue;
        }
        n += n_tokens;
        if (n_tokens == 1) { // for several tokens the number of experts that they share is unknown
            routing.device->count_unasked(layer.batch.layer, layer.batch.n_used);
        }
    }
    if (n > 0) {
        routing.table.count_tokens(n);
    }
}

void Context::computes(int layer) {
    if (insert(layers, layer)) {
        routing.prefetcher.set_layers(id, layers);
        routing.computes(layer);
    }
}

int32_t * Context::changed_of(int n_tokens) {
    if ((int) changed.size() != n_tokens) {
        const int32_t most = changed.empty() ? 0 : *std::max_element(changed.begin(), changed.end());
        changed.assign(n_tokens, most);
    }
    return changed.data();
}

const DeviceLandings::Landing * Context::landing_of(int layer, int64_t n, int64_t most) {
    DeviceLandings & pool = routing.device->bank(layer).landings;
    const auto       last =
        std::find_if(landings.rbegin(), landings.rend(), [&](const auto & landing) { return landing.first == &pool; });
    if (last != landings.rend() && last->second->rows->ne[0] >= n) {
        return last->second;
    }
    const auto * landing = pool.take(std::max(n, most)); // a reserve rounds tokens up
    landing              = landing ? landing : pool.take(n);
    if (landing) {
        landings.push_back({ &pool, landing });
    }
    return landing;
}

const DeviceLandings::Landing * Context::zero_copy_of(int layer, int64_t n, int64_t n_used) {
    DeviceLandings & pool = routing.device->bank(layer).landings;
    for (const auto & [of, piece] : zero_copies) {
        if (of == &pool && piece->holds(n * n_used, 2 * n_used)) {
            return piece;
        }
    }
    const auto * piece = pool.take_zero_copy(n * n_used, 2 * n_used);
    if (piece) {
        zero_copies.push_back({ &pool, piece });
    }
    return piece;
}

void Context::advance(const int32_t * to, int n_tokens) {
    changed.clear();
    continues = to && (int) positions.size() == n_tokens;
    for (int t = 0; continues && t < n_tokens; ++t) {
        continues = to[t] == positions[t] + 1;
    }
    positions.assign(to, to + (to ? n_tokens : 0));
}

Context * find_context(const void * id) {
    MutexLock  lock(mutex);
    const auto found = contexts.find(id);
    return found != contexts.end() ? found->second.get() : nullptr;
}

Context & open_context(const void * id, Routing & routing) {
    MutexLock lock(mutex);
    auto &    context = contexts[id];
    if (!context) {
        context = std::make_unique<Context>(id, routing);
    }
    return *context;
}

void end_context(const void * id, bool freed) {
    Context * context = find_context(id);
    if (!context) {
        return;
    }
    if (context->routing.device) {
        context->routing.device->release(context->on_device);
    }
    if (!freed) {
        context->routing.table.release(context->owner);
    } else {
        context->routing.prefetcher.forget(id);
        context->routing.table.forget(context->owner);
        if (context->routing.simulated_cache) {
            context->routing.simulated_cache->forget(id);
        }
        if (context->routing.device) {
            context->routing.device->forget(id);
        }
        for (const auto & pieces : { context->landings, context->zero_copies }) {
            for (const auto & [of, piece] : pieces) {
                of->give_back(piece);
            }
        }
        MutexLock lock(mutex);
        contexts.erase(id);
    }
}

void forget_contexts(const Routing & routing) {
    MutexLock lock(mutex);
    for (auto context = contexts.begin(); context != contexts.end();) {
        context = &context->second->routing == &routing ? contexts.erase(context) : std::next(context);
    }
}

unsigned graph_needs(const Routing & routing, bool predicted) {
    const Substitutions::Seen seen   = routing.substitutions.seen();
    const unsigned            ghosts = seen.inputs ? GRAPH_GHOSTS : 0;
    if (!routing.device || routing.observer.active || routing.remote.active() || routing.calibration.active() ||
        routing.speculation.mode() != PYORCH_SPECULATE_NONE) {
        return GRAPH_ALL | ghosts;
    }
    // If each expert is uploaded once, none is absent later, and a forecast gains nothing.
    if (routing.device->has_room_for_all() && !routing.simulated_cache) {
        return 0;
    }
    const bool changes = routing.substitutions.active();
    unsigned   needs   = GRAPH_PROCESSOR | GRAPH_OTHERS;
    if (changes) {
        needs |= GRAPH_CHANGES | GRAPH_WEIGHTS | ghosts;
        needs |= seen.probs ? GRAPH_PROBS : 0;
        needs |= seen.logits ? GRAPH_LOGITS : 0;
        needs |= seen.inputs ? GRAPH_INPUTS : 0;
    }
    // If host memory has nearly all experts, nothing is prefetched; forecasts then cause uploads only.
    if (predicted && routing.prefetcher.active() &&
        (routing.device->takes_forecasts() || !routing.table.has_nearly_all())) {
        const unsigned by_predictors = routing.prefetcher.needs();
        needs |= GRAPH_WEIGHTS;
        needs |= by_predictors & PYORCH_NEEDS_DISTRIBUTIONS ? GRAPH_PROBS : 0;
        needs |= by_predictors & PYORCH_NEEDS_STATES ? GRAPH_RESIDUALS : 0;
    }
    return needs;
}

} // namespace pyorch
