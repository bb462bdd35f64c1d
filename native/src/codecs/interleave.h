// Interleaves rows of quantized matrices in groups of eight, as llama.cpp's repacked kernels want them.
//
// llama.cpp interleaves Q4_K and Q2_K byte by byte; these functions use vectors and make the same bytes. llama.cpp
// interleaves other types about as fast as it copies memory.

#pragma once

#include <cstddef>
#include <cstdint>

namespace pyorch {

inline constexpr int64_t INTERLEAVED_ROWS = 8;

// rows: 8 rows of n_blocks super-blocks of 256 numbers, row_bytes apart. to: 8 rows in the new order.
// REQUIRES: rows and to do not overlap.
using Interleave = void (*)(const uint8_t * rows, size_t row_bytes, size_t n_blocks, uint8_t * to);

// Returns null if this processor lacks the vectors.
Interleave interleave_q4_k();
Interleave interleave_q2_k();

} // namespace pyorch
