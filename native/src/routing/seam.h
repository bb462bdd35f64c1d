// The seam to llama.cpp: what patches/ calls.

#pragma once

#include "engine.h"

namespace pyorch {

// What the loads of the calling thread do with expert tensors. Null map: nothing. Null engine: the
// experts are mapped and nobody manages them.
void capture(const ModelMap * map, pyorch_engine * engine);

// The engine is about to go.
void forget(const pyorch_engine * engine);

} // namespace pyorch
