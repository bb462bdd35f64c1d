// Measures the costs of each order of an expert's matrix on a core of this processor.

#pragma once

#include "model/model_map.h"

namespace pyorch {

// Processor time for a matrix, in nanoseconds for each byte. Matrices are cold: they come from memory, not from caches.
struct LayoutRates {
    static constexpr int N_INPUTS = 8; // of an expert in a prompt

    double repacking;             // from the file's order
    double plain[2], repacked[2]; // a product with 1 input, and with N_INPUTS
};

// Measures for some tenths of a second, with 72 MiB of matrices, or three matrices if they are larger. Throws Failure
// if that memory cannot be allocated.
// REQUIRES: can_repack(tensor).
LayoutRates measure_layouts(const ExpertTensor & tensor);

} // namespace pyorch
