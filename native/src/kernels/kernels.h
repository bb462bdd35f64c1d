// Kernels that multiply the rows of one expert's matrix with the inputs that its tokens bring.
//
// A kernel gives the bits that llama.cpp gives for each finite input by itself, whatever the number of inputs. It loads
// each row once for several inputs, where llama.cpp's mul_mat_id loads it again for each.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace pyorch {

// Some rows of a matrix times all inputs of its expert.
struct Product {
    int64_t                 n_in;    // numbers in a row
    const uint8_t *         rows;    // the first row, or the first group of interleaved rows
    int64_t                 n_rows;  // of interleaved rows a multiple of 8
    const uint8_t * const * inputs;  // [n_inputs], each of n_in numbers, quantized as llama.cpp does it for the type
    float * const *         outputs; // [n_inputs], each of n_rows numbers
    int                     n_inputs;
};

using Kernel = void (*)(const Product & product);

// The fastest kernel for matrices [n_in, n_out] of this type, in llama.cpp's order for repacked weights or in the
// file's order. Null if this processor has none, or if a trial gave other bits than llama.cpp's kernel. A process tries
// each kernel once.
//
// n_refused: leaves out so many of the fastest kernels that this processor has. Tests and benchmarks use it.
Kernel find_kernel(ggml_type type, int64_t n_in, int64_t n_out, bool repacked, int n_refused = 0);

} // namespace pyorch
