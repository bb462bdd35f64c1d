#include "residency/policies/policy_list.h"

#include "base/status.h"
#include "residency/policies/finemoe.h"
#include "residency/policies/learned.h"
#include "residency/policies/learned_value.h"

#include <algorithm>

namespace pyorch {

const Policies & policy_list() {
    static const Policies list = {
        { PYORCH_LRU, "lru", 0, 0, "the least recently used expert goes first",
            [](int) -> std::unique_ptr<EvictionPolicy> { return std::make_unique<Lru>(); } },
        { PYORCH_LFU, "lfu", 0, 0, "the least frequently used goes first, and old uses fade",
            [](int n_layers) -> std::unique_ptr<EvictionPolicy> { return std::make_unique<Lfu>(n_layers); } },
        { PYORCH_FINEMOE, "finemoe", 0, PYORCH_NEEDS_FORECASTS,
            "the least frequently used goes first, but before it those that no predictor names",
            [](int n_layers) -> std::unique_ptr<EvictionPolicy> { return std::make_unique<FineMoe>(n_layers); } },
        { PYORCH_LEARNED, "learned", 0, 0, "what will be used latest goes first, as learned while decoding",
            [](int) -> std::unique_ptr<EvictionPolicy> { return std::make_unique<Learned>(1, true, 4, 0); },
            [](const LearnerSizes & sizes) -> std::unique_ptr<Learner> {
                return std::make_unique<LearnedValue>(sizes.n_experts, sizes.n_used);
            } },
    };
    return list;
}

const PolicyEntry & find_policy(const Policies & policies, pyorch_policy kind) {
    const auto found =
        std::find_if(policies.begin(), policies.end(), [&](const PolicyEntry & entry) { return entry.kind == kind; });
    if (found == policies.end()) {
        throw Failure(PYORCH_INVALID, format("the eviction policy %d is not known here", (int) kind));
    }
    return *found;
}

} // namespace pyorch
