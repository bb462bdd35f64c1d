#include "residency/learning.h"

#include "base/status.h"

#include <algorithm>

namespace pyorch {

Learning::Learning(const LearnerSizes & sizes, Values & values, std::mutex & mutex) :
        sizes(sizes), values(values), mutex(mutex) {
    make_learner();
}

// REQUIRES: both mutexes
void Learning::make_learner() {
    const auto make = values.chosen().make_learner;
    learner         = make ? make(sizes) : nullptr;
    visits.clear();
    has_visits = false;
    publish_all();
}

// REQUIRES: learning
LearnedValue & Learning::learned_value() {
    auto * value = dynamic_cast<LearnedValue *>(learner.get());
    if (!value) {
        throw Failure(PYORCH_INVALID, "the eviction policy learns nothing that could be kept: only learned does");
    }
    return *value;
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
void Learning::publish_all() {
    for (int layer = 0; learner && layer < values.n_layers(); ++layer) {
        publish(layer);
    }
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
