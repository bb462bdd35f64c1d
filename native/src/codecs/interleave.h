// Rows of quantized matrices, interleaved in groups of eight as llama.cpp's repacked kernels want them.
//
// llama.cpp interleaves Q4_K and Q2_K a byte at a time; these functions use vectors and make the same bytes. Other types
// are not here, because llama.cpp interleaves them about as fast as memory is copied.

#pragma once

#include <cstddef>
#include <cstdint>

namespace pyorch {

inline constexpr int64_t INTERLEAVED_ROWS = 8;

// rows: 8 rows of n_blocks super-blocks of 256 numbers, row_bytes apart. to: 8 rows in the new order.
// REQUIRES: rows and to do not overlap.
using Interleave = void (*)(const uint8_t * rows, size_t row_bytes, size_t n_blocks, uint8_t * to);

// Null if this processor has none of the vectors that they need.
Interleave interleave_q4_k();
Interleave interleave_q2_k();

} // namespace pyorch
