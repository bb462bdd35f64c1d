// The eviction policies that a replay can take: those of engines that compute, and those that exist to be compared
// with.

#pragma once

#include "residency/policies/policy.h"

namespace pyorch {

// In the order of their kinds.
const Policies & replay_policies();

} // namespace pyorch
