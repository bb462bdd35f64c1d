#include "replay/policies/replay_policies.h"

#include "replay/policies/belady.h"
#include "replay/policies/decay_bandit.h"
#include "replay/policies/fifo.h"
#include "replay/policies/least_stale.h"
#include "replay/policies/marking.h"
#include "residency/policies/learned.h"
#include "residency/policies/policy_list.h"

#include <algorithm>
#include <limits>

namespace pyorch {
namespace {

template <typename Policy>
std::unique_ptr<EvictionPolicy> make(int) {
    return std::make_unique<Policy>();
}

Policies with_those_of_engines() {
    Policies list = {
        { PYORCH_BELADY, "belady", PYORCH_NEEDS_FUTURE, 0, "what is needed last goes first", make<Belady> },
        { PYORCH_BANDIT, "bandit", PYORCH_NEEDS_REPLAY, 0, "as lfu, with the fading that lately hit most often",
            [](int) -> std::unique_ptr<EvictionPolicy> {
                return std::make_unique<Learned>(std::numeric_limits<double>::max() / 2, false, 1, 1);
            },
            [](const LearnerSizes & sizes) -> std::unique_ptr<Learner> {
                return std::make_unique<DecayBandit>(sizes.n_experts, sizes.slot_bytes);
            } },
        { PYORCH_LEAST_STALE, "least-stale", PYORCH_NEEDS_REPLAY, 0,
            "what the last token did not use goes first, of the layer whose turn comes last", make<LeastStale> },
        { PYORCH_FIFO, "fifo", PYORCH_NEEDS_REPLAY, 0, "what came into memory first goes first", make<Fifo> },
        { PYORCH_MARKING, "marking", PYORCH_NEEDS_REPLAY, 0, "at random, of what was not used since all others were",
            make<Marking> },
    };
    list.insert(list.end(), policy_list().begin(), policy_list().end());
    std::sort(list.begin(), list.end(), [](const PolicyEntry & a, const PolicyEntry & b) { return a.kind < b.kind; });
    return list;
}

} // namespace

const Policies & replay_policies() {
    static const Policies list = with_those_of_engines();
    return list;
}

} // namespace pyorch
