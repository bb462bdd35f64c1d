// The seam to llama.cpp: what patches/ calls. The contract is docs/seam.md.

#pragma once

#include "routing/routing.h"

namespace pyorch {

// What the loads of the calling thread do with expert tensors. Null map: nothing. Null routing: the experts are mapped
// and nobody manages them. Both outlive the models that are loaded meanwhile, and their contexts.
void capture(const ModelMap * map, Routing * routing);

} // namespace pyorch
