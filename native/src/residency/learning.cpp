#include "residency/learning.h"

#include "base/status.h"

#include <algorithm>

namespace pyorch {

Learning::Learning(const ModelMap & map, Values & values, std::mutex & mutex) : map(map), values(values), mutex(mutex) {
    make_learner();
}

// REQUIRES: both mutexes
void Learning::make_learner() {
    learner = learns() ? std::make_unique<LearnedValue>(map.n_experts(), map.n_expert_used) : nullptr;
    visits.clear();
    has_visits = false;
    publish_all();
}

// REQUIRES: learning
LearnedValue & Learning::checked_learner() {
    if (!learner) {
        throw Failure(PYORCH_INVALID, "the eviction policy learns nothing that could be kept: only learned does");
    }
    return *learner;
}

void Learning::note(Visit visit) {
    visits.push_back(std::move(visit));
    has_visits = true;
}

// REQUIRES: learning
void Learning::learn_all() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!visits.empty()) {
        const Visit visit = std::move(visits.front());
        visits.pop_front();
        if (!visit.experts.empty()) { // else its experts counted as used since
            lock.unlock();
            learner->visit(visit);
            lock.lock();
        }
        publish(visit.layer);
    }
    has_visits = false;
}

// REQUIRES: both mutexes
void Learning::publish_all() {
    for (int layer = 0; learner && layer < values.n_layers(); ++layer) {
        publish(layer);
    }
}

std::vector<double> Learning::visit(const Visit & visit) {
    std::lock_guard<std::mutex> learning_lock(learning);
    if (!learner) {
        return {};
    }
    learn_all();
    learner->visit(visit);
    std::lock_guard<std::mutex> lock(mutex);
    publish(visit.layer);
    return learner->values(visit.layer);
}

void Learning::forget(const void * context) {
    std::lock_guard<std::mutex> learning_lock(learning);
    std::lock_guard<std::mutex> lock(mutex);
    if (learner) {
        learner->forget(context);
    }
    visits.erase(std::remove_if(visits.begin(), visits.end(), [&](const Visit & v) { return v.context == context; }),
        visits.end());
    has_visits = !visits.empty();
}

} // namespace pyorch
