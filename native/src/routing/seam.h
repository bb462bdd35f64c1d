// The seam to llama.cpp: what patches/ calls. The contract is docs/seam.md.

#pragma once

#include "routing/routing.h"

namespace pyorch {

// Who manages the experts of the models that the calling thread loads; null: llama.cpp. Outlives these models and their
// contexts.
void capture(Routing * routing);

} // namespace pyorch
