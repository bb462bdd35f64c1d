// What each order of an expert's matrix costs a core of this processor, measured.

#pragma once

#include "model/model_map.h"

namespace pyorch {

// Processor time for a matrix, in nanoseconds for each of its bytes. Matrices are cold: they come from memory.
struct LayoutRates {
    static constexpr int N_INPUTS = 8; // of an expert in a prompt

    double repacking;             // a matrix that was read, into the order of the repacked kernels
    double plain[2], repacked[2]; // a product with 1 input, and with N_INPUTS
};

// Takes some tenths of a second, and the memory of 72 MiB of matrices meanwhile, of three matrices at least. Throws
// Failure if that cannot be allocated.
// REQUIRES: can_repack(tensor).
LayoutRates measure_layouts(const ExpertTensor & tensor);

} // namespace pyorch
