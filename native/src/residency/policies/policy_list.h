// The eviction policies there are: how users call them, and what makes one.

#pragma once

#include "residency/policies/policy.h"

namespace pyorch {

// In the order of their kinds. Those that exist to be compared with are for replays: replay/policies/replay_policies.h.
const Policies & policy_list();

// Throws Failure where the list has no such policy.
const PolicyEntry & find_policy(const Policies & policies, pyorch_policy kind);

} // namespace pyorch
