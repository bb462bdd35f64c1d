#include "residency/learning.h"

#include "base/status.h"

#include <algorithm>

namespace pyorch {

Learning::Learning(const ModelMap & map, Values & values, Mutex & mutex) : map(map), mutex(mutex), values(values) {
    make_learner();
}

void Learning::make_learner() {
    learner = learns() ? std::make_unique<LearnedValue>(map.n_experts(), map.n_expert_used) : nullptr;
    visits.clear();
    has_visits = false;
    publish_all();
}

LearnedValue & Learning::checked_learner() {
    if (!learner) {
        throw Failure(PYORCH_INVALID, "the eviction policy learns nothing that could be kept: only learned does");
    }
    return *learner;
}

void Learning::note(const Locked & locked, Visit visit) {
    mutex.assert_held(locked);
    visits.push_back(std::move(visit));
    has_visits = true;
}

void Learning::learn_all() {
    MutexLock lock(mutex);
    while (!visits.empty()) {
        const Visit visit = std::move(visits.front());
        visits.pop_front();
        if (!visit.experts.empty()) { // otherwise its experts have counted as used since
            MutexUnlock unlock(mutex);
            learner->visit(visit);
        }
        publish(visit.layer);
    }
    has_visits = false;
}

void Learning::publish_all() {
    for (int layer = 0; learner && layer < values.n_layers(); ++layer) {
        publish(layer);
    }
}

std::vector<double> Learning::visit(const Visit & visit) {
    MutexLock learning_lock(learning);
    if (!learner) {
        return {};
    }
    learn_all();
    learner->visit(visit);
    MutexLock lock(mutex);
    publish(visit.layer);
    return learner->values(visit.layer);
}

void Learning::forget(const void * context) {
    MutexLock learning_lock(learning);
    MutexLock lock(mutex);
    if (learner) {
        learner->forget(context);
    }
    visits.erase(std::remove_if(visits.begin(), visits.end(), [&](const Visit & v) { return v.context == context; }),
        visits.end());
    has_visits = !visits.empty();
}

} // namespace pyorch
