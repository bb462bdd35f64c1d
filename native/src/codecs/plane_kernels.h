// What planes are merged and tables are looked up with: the same functions for each kind of vectors. All work on whole
// blocks of 64 numbers.

#pragma once

#include "codecs/bit_planes.h"

namespace pyorch {

inline constexpr size_t CODE_BYTES = 3 * sizeof(uint64_t); // of the codes of a block

inline constexpr size_t NIBBLE_BLOCK_BYTES = 3 * PLANE_BLOCK / 2; // see nibble.h

// Of number i of 32, where its byte is.
constexpr size_t nibble_place(size_t i) { return i / 8 == 1 ? i + 8 : i / 8 == 2 ? i - 8 : i; }

struct PlaneKernels {
    // e [n_blocks * 64], sm -> raw. A block of sm is read before that of raw is written, each exponent before its
    // number.
    using Merge = void (*)(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw);

    // table [8], codes [n_blocks * CODE_BYTES], escapes up to their end -> e [n_blocks * 64]. Returns where the escapes
    // that are left begin, null if there were not enough.
    using Lookup = const uint8_t * (*)(const uint8_t * table, const uint8_t * codes, size_t n_blocks,
        const uint8_t * escapes, const uint8_t * end, uint8_t * e);

    // exponents [16], blocks [n_blocks * NIBBLE_BLOCK_BYTES] -> rows, BF16 [n_blocks * 64]
    using Nibbles = void (*)(const uint8_t * exponents, const uint8_t * blocks, size_t n_blocks, uint8_t * rows);

    Merge   bf16;
    Merge   f16;
    Merge   f32;
    Lookup  lookup;
    Nibbles nibbles;

    Merge merge(Numbers type) const { return type == Numbers::BF16 ? bf16 : type == Numbers::F16 ? f16 : f32; }
};

const PlaneKernels & scalar_kernels();
const PlaneKernels & neon_kernels(); // REQUIRES has_simd(), likewise below
const PlaneKernels & avx2_kernels();
const PlaneKernels & avx512_kernels();

const PlaneKernels & plane_kernels(Simd simd);

} // namespace pyorch
