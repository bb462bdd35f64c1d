// The form of a BF16 matrix from which kernels compute: any row of it becomes what ggml computes with by itself.
//
// Exponents of trained weights are few: the 15 commonest of a matrix have a code of four bits each, the others an
// escape, which is rare. So a matrix [n_in, n_out] takes three quarters of its bytes:
//
//     [64]                 the exponents of codes 0 to 14, a zero; n_in, 32 bits; zeros
//     [n_out][n_in/64][96] of each 64 numbers of a row, codes [32]: of number i the low half of a byte, of number
//                          32 + i the high one; then sign << 7 | mantissa of each [64]. Of each 32 bytes the second and
//                          the third eight have changed places, which is how vectors of 32 want them. Of 32 numbers at
//                          the end of a row, codes [32] and sign << 7 | mantissa [32]
//     [n_out + 1]          32 bits each: how many escapes the rows before have
//     [n/256]              32 bits each: exponent << 24 | position in the row; zeros behind the last escape
//
// and zeros up to a multiple of 64. So all matrices of a shape have one size, and a slot has room for any.

#pragma once

#include "codecs/bit_planes.h"

#include <vector>

namespace pyorch {

// Whether matrices of such rows can have it.
bool has_nibbles(Numbers type, uint64_t n_in);

uint64_t nibble_bytes(uint64_t n_in, uint64_t n_out);

// raw: BF16 [n_out][n_in] -> `to`, replaced: [nibble_bytes]. False for a matrix with more escapes, or one that is too
// small to gain by it.
bool encode_nibbles(const uint8_t * raw, uint64_t n_in, uint64_t n_out, std::vector<uint8_t> & to);

// n_in of what is stored; 0 where it cannot be such a matrix.
uint64_t nibble_row(const uint8_t * stored, uint64_t bytes);

// Whether decode_nibbles() stays within stored [bytes] and within its rows.
bool check_nibbles(const uint8_t * stored, uint64_t bytes, uint64_t n_in, uint64_t n_out);

// Rows first to first + n: BF16 [n][n_in]. REQUIRES: check_nibbles()
void decode_nibbles(const uint8_t * stored, uint64_t n_in, uint64_t n_out, uint64_t first, uint64_t n, uint8_t * rows,
    Simd simd = best_simd());

} // namespace pyorch
