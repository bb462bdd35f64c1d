// The eviction policies of replays: the engine's, and policies for comparison only.

#pragma once

#include "residency/policies/policy.h"

namespace pyorch {

// Returns them in the order of their kinds.
const Policies & replay_policies();

} // namespace pyorch
