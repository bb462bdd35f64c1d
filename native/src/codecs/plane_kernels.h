// The kernels that merge planes and look up tables, alike for each kind of vectors. All work on whole blocks of 64
// numbers.

#pragma once

#include "codecs/bit_planes.h"

namespace pyorch {

inline constexpr size_t CODE_BYTES = 3 * sizeof(uint64_t); // the codes of a block

inline constexpr size_t NIBBLE_BLOCK_BYTES = 3 * PLANE_BLOCK / 2; // see nibble.h

// Returns the place of number i's byte, of 32.
constexpr size_t nibble_place(size_t i) { return i / 8 == 1 ? i + 8 : i / 8 == 2 ? i - 8 : i; }

struct PlaneKernels {
    // Merges e [n_blocks * 64] and sm into raw. A block of sm is read before that of raw is written, and each exponent
    // before its number.
    using Merge = void (*)(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw);

    // Looks up codes [n_blocks * CODE_BYTES] in table [8], with escapes up to their end, into e [n_blocks * 64].
    // Returns the start of the unused escapes, null if there were not enough.
    using Lookup = const uint8_t * (*)(const uint8_t * table, const uint8_t * codes, size_t n_blocks,
        const uint8_t * escapes, const uint8_t * end, uint8_t * e);

    // Decodes blocks [n_blocks * NIBBLE_BLOCK_BYTES] with exponents [16] to rows, BF16 [n_blocks * 64].
    using Nibbles = void (*)(const uint8_t * exponents, const uint8_t * blocks, size_t n_blocks, uint8_t * rows);

    Merge   bf16;
    Merge   f16;
    Merge   f32;
    Lookup  lookup;
    Nibbles nibbles;

    Merge merge(Numbers type) const { return type == Numbers::BF16 ? bf16 : type == Numbers::F16 ? f16 : f32; }
};

const PlaneKernels & scalar_kernels();
const PlaneKernels & neon_kernels(); // REQUIRES: has_simd(), also for the next ones
const PlaneKernels & avx2_kernels();
const PlaneKernels & avx512_kernels();

const PlaneKernels & plane_kernels(Simd simd);

} // namespace pyorch
