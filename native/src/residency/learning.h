// Learning: the policy learns the values of experts from the visits of layers.
//
// It has a mutex of its own, taken before the table's. A compute thread learns when it would sleep for a read, and at
// the latest when the next layer comes. A thread for it was measured: to wake it costs a compute thread more than the
// arithmetic. A layer that misses an expert, and so needs a victim, has the time of the read for it.

#pragma once

#include "base/mutex.h"
#include "model/model_map.h"
#include "residency/policies/learned_value.h"
#include "residency/values.h"

#include <atomic>
#include <deque>
#include <memory>

namespace pyorch {

class Learning {
public:
    // mutex: the table's; it guards the values.
    Learning(const ModelMap & map, Values & values, Mutex & mutex);

    // Changes the policy. After `choose`, nothing of the last one is left.
    template <typename Choose>
    void change_policy(Choose choose) {
        MutexLock learning_lock(learning);
        MutexLock lock(mutex);
        choose(mutex.locked());
        make_learner();
    }

    // Notes a visit. A visit without experts only has the learned values published, since its layer comes.
    void note(const Locked & locked, Visit visit);
    bool learns(const Locked & locked) const {
        mutex.assert_held(locked);
        return learns();
    }

    // Learns from all noted visits.
    void learn() {
        if (has_visits) {
            MutexLock learning_lock(learning);
            learn_all();
        }
    }

    // The same, unless another thread is learning.
    void try_learn() {
        if (has_visits && learning.try_lock()) {
            MutexLock learning_lock(learning, std::adopt_lock);
            learn_all();
        }
    }

    // Calls use(LearnedValue &) of the policy `learned`, while no thread learns. Throws Failure for other policies.
    template <typename Use>
    void with_learned(Use use) {
        MutexLock learning_lock(learning);
        use(checked_learner());
        MutexLock lock(mutex);
        publish_all();
    }

    // Learns from a visit now. Returns the values of its layer; empty if the policy learns nothing.
    std::vector<double> visit(const Visit & visit);

    // The context is gone.
    void forget(const void * context);

private:
    const ModelMap &  map;
    Mutex &           mutex;
    Mutex             learning;
    Values &          values GUARDED_BY(mutex);
    std::deque<Visit> visits GUARDED_BY(mutex); // not learned from yet
    std::atomic<bool> has_visits{ false };

    // Null if the policy learns nothing.
    std::unique_ptr<LearnedValue> learner GUARDED_BY(learning) PT_GUARDED_BY(learning);

    bool           learns() const REQUIRES(mutex) { return values.chosen().learns; }
    void           make_learner() REQUIRES(learning, mutex);
    LearnedValue & checked_learner() REQUIRES(learning);
    void           learn_all() REQUIRES(learning);
    void           publish(int layer) REQUIRES(learning, mutex) { values.set_learned(layer, learner->values(layer)); }
    void           publish_all() REQUIRES(learning, mutex);
};

} // namespace pyorch
