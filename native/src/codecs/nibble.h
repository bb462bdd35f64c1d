// A compressed form of BF16 matrices for kernels: each row can be decoded separately, to the numbers that ggml needs.
//
// Trained weights have few different exponents: the 15 commonest of a matrix have a code of four bits each, the others
// an escape, which is rare. So a matrix [n_in, n_out] needs three quarters of its bytes:
//
//     [64]                 the exponents of codes 0 to 14, a zero; n_in, 32 bits; zeros
//     [n_out][n_in/64][96] of each 64 numbers of a row, codes [32]: of number i the low half of a byte, of number
//                          32 + i the high one; then sign << 7 | mantissa of each [64]. In each 32 bytes the second and
//                          the third eight are exchanged, as vectors of 32 want them. For 32 numbers at the end of a
//                          row, codes [32] and sign << 7 | mantissa [32]
//     [n_out + 1]          32 bits each: the number of escapes in all rows before
//     [n/256]              32 bits each: exponent << 24 | position in the row; zeros after the last escape
//
// and zeros up to a multiple of 64. So all matrices of a shape have one size, and fit into the same slots.

#pragma once

#include "codecs/bit_planes.h"

#include <vector>

namespace pyorch {

// Returns whether matrices with such rows can have this form.
bool has_nibbles(Numbers type, uint64_t n_in);

uint64_t nibble_bytes(uint64_t n_in, uint64_t n_out);

// Encodes raw, BF16 [n_out][n_in], and replaces `to` [nibble_bytes]. Returns false if the matrix has more escapes, or
// is too small to become smaller.
bool encode_nibbles(const uint8_t * raw, uint64_t n_in, uint64_t n_out, std::vector<uint8_t> & to);

// Returns n_in of a stored matrix; 0 if it cannot be one.
uint64_t nibble_row(const uint8_t * stored, uint64_t bytes);

// Returns whether decode_nibbles() stays within stored [bytes] and within its rows.
bool check_nibbles(const uint8_t * stored, uint64_t bytes, uint64_t n_in, uint64_t n_out);

// Decodes rows first to first + n to BF16 [n][n_in]. REQUIRES: check_nibbles().
void decode_nibbles(const uint8_t * stored, uint64_t n_in, uint64_t n_out, uint64_t first, uint64_t n, uint8_t * rows,
    Simd simd = best_simd());

} // namespace pyorch
