// How the table learns what experts are worth.
//
// A thread of its own for it was measured: to wake it costs a compute thread more than to do the arithmetic itself, and
// where a layer misses an expert, which is where memory is taken from others, compute threads have the time of the
// read.

#include "residency/table.h"

#include <algorithm>

namespace pyorch {

LearnerSizes Table::learner_sizes() const {
    LearnerSizes sizes = { {}, {}, map.n_expert_used };
    for (const auto & layer : map.layers) {
        sizes.n_experts.push_back(layer.n_expert);
        sizes.slot_bytes.push_back(layer.slot_bytes());
    }
    return sizes;
}

// REQUIRES: both mutexes
void Table::make_learner_of() {
    const auto make = values.chosen().make_learner;
    learner         = make ? make(learner_sizes()) : nullptr;
    learns          = learner != nullptr;
    visits.clear();
    has_visits = false;
    publish_all();
}

// REQUIRES: learning
LearnedValue & Table::learned_value() {
    auto * value = dynamic_cast<LearnedValue *>(learner.get());
    if (!value) {
        throw Failure(PYORCH_INVALID, "the eviction policy learns nothing that could be kept: only learned does");
    }
    return *value;
}

// The budget, where it is one: 0 where all experts fit.
uint64_t Table::scarce_bytes() {
    std::lock_guard<std::mutex> lock(mutex);
    return bank->budget() < map.slots_bytes() ? bank->matrices_budget() : 0;
}

// A layer was routed. A prompt says little about what decoding will need, and a warm-up, which asks for nothing, none.
// Where all experts fit none goes.
void Table::note_visit(const Owner & owner, int layer, const Demand & demand) {
    if (learns && !demand.scans() && !demand.asked.empty() && bank->budget() < map.slots_bytes()) {
        visits.push_back({ owner.context, layer, demand.continues, bank->matrices_budget(), {} });
        if (!demand.learned) {
            visits.back().experts = demand.asked;
        }
        has_visits = true;
    }
}

// REQUIRES: learning
void Table::learn() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!visits.empty()) {
        const Visit visit = std::move(visits.front());
        visits.pop_front();
        if (visit.experts.empty()) { // its experts counted as used since
            publish(visit.layer);
            continue;
        }
        lock.unlock();
        learner->visit(visit);
        lock.lock();
        if (learner->all_changed()) {
            publish_all();
        } else {
            publish(visit.layer);
        }
    }
    has_visits = false;
}

// REQUIRES: both mutexes
void Table::publish(int layer) { values.set_learned(layer, learner->values(layer)); }

// REQUIRES: both mutexes
void Table::publish_all() {
    for (int layer = 0; learner && layer < (int) layers.size(); ++layer) {
        publish(layer);
    }
}

// REQUIRES: both mutexes
void Table::forget_visits(const void * context) {
    if (learner) {
        learner->forget(context);
    }
    visits.erase(std::remove_if(visits.begin(), visits.end(), [&](const Visit & v) { return v.context == context; }),
        visits.end());
    has_visits = !visits.empty();
}

} // namespace pyorch
