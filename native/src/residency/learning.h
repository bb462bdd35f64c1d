// Learning: what visits of layers teach a policy, for the values of experts.
//
// It takes arithmetic, which is done under a mutex of its own, taken before that of the table: by a compute thread that
// would sleep for a read, and at the latest by the layer that comes next. A thread of its own for it was measured: to
// wake it costs a compute thread more than to do the arithmetic itself, and where a layer misses an expert, which is
// where memory is taken from others, compute threads have the time of the read.

#pragma once

#include "model/model_map.h"
#include "residency/policies/learned_value.h"
#include "residency/values.h"

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>

namespace pyorch {

class Learning {
public:
    // mutex: of the table, which guards the values.
    Learning(const ModelMap & map, Values & values, std::mutex & mutex);

    // Another policy was chosen. From what `choose` does on, nothing of the last one is left.
    template <typename Choose>
    void change_policy(Choose choose) {
        std::lock_guard<std::mutex> learning_lock(learning);
        std::lock_guard<std::mutex> lock(mutex);
        choose();
        make_learner();
    }

    // Notes a visit; without experts, what was learned from it is only to be published: its layer comes. REQUIRES: the
    // mutex of the table
    void note(Visit visit);
    bool learns() const { return values.chosen().learns; } // the same

    // Learns from all visits that were noted.
    void learn() {
        if (has_visits) {
            std::lock_guard<std::mutex> learning_lock(learning);
            learn_all();
        }
    }

    // The same, unless another thread does.
    void try_learn() {
        std::unique_lock<std::mutex> learning_lock(learning, std::defer_lock);
        if (has_visits && learning_lock.try_lock()) {
            learn_all();
        }
    }

    // Calls use(LearnedValue &) of the policy learned, while nothing is learned. Throws Failure for other policies.
    template <typename Use>
    void with_learned(Use use) {
        std::lock_guard<std::mutex> learning_lock(learning);
        use(checked_learner());
        std::lock_guard<std::mutex> lock(mutex);
        publish_all();
    }

    // Learns from a visit now. Returns the values of its layer; none, where the policy learns nothing.
    std::vector<double> visit(const Visit & visit);

    // The context is gone.
    void forget(const void * context);

private:
    const ModelMap &              map;
    Values &                      values;
    std::mutex &                  mutex;
    std::mutex                    learning;
    std::unique_ptr<LearnedValue> learner; // guarded by it; null where the policy learns nothing
    std::deque<Visit>             visits;  // that nothing was learned from yet; guarded by the mutex of the table
    std::atomic<bool>             has_visits{ false };

    void           make_learner();
    LearnedValue & checked_learner();
    void           learn_all();
    void           publish(int layer) { values.set_learned(layer, learner->values(layer)); }
    void           publish_all();
};

} // namespace pyorch
