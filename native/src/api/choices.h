// What can be chosen by name, as the API lists it.

#pragma once

#include "pyorch.h"

#include <vector>

namespace pyorch {

// In the order of their values. Throws Failure for a list that does not exist.
const std::vector<pyorch_choice> & choices(int32_t which);

// The choice with that value; throws Failure where there is none, or it is for replays and this is none.
const pyorch_choice & checked_choice(int32_t which, int32_t value, bool in_replay = false);

} // namespace pyorch
