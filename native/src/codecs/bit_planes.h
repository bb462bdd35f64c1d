// Splits a matrix's numbers into exponents, which repeat, and signs with mantissas, which do not (ZipMoE, section 3.1).
//
// The exponent plane (E) has a byte for each number. The sign-mantissa plane (SM) has the other bits, in blocks of 64
// numbers, so that any run of whole blocks can be merged separately:
//
//     BF16   64 bytes: sign << 7 | mantissa, of each number
//     F16    88 bytes: the low 8 bits of each mantissa [64]; then three words of 64 bits, which have bit 8 and bit 9 of
//            each mantissa and each sign
//     F32   192 bytes: mantissa bits 0 to 7 [64], 8 to 15 [64], sign << 7 | mantissa bits 16 to 22 [64]
//
// The last block of a matrix is whole in the SM plane, padded with zeros. All words are little-endian, as all supported
// machines are.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pyorch {

// The division of numbers into planes, by type.
enum class Numbers : uint8_t {
    BYTES, // not divided: quantized
    BF16,
    F16,
    F32,
};

inline constexpr size_t PLANE_BLOCK = 64; // numbers

// Returns the blocks of n numbers.
constexpr size_t n_blocks_of(size_t n) { return n / PLANE_BLOCK + (n % PLANE_BLOCK != 0); }

// Returns the division for a ggml type's name, such as "bf16".
Numbers numbers_of(const std::string & ggml_type);

size_t number_bytes(Numbers type);            // of one number; 1 for BYTES
size_t sm_bytes(Numbers type, size_t n);      // of the SM plane of n numbers; 0 for BYTES
size_t sm_offset(Numbers type, size_t first); // in the SM plane, of the block that starts with number `first`

// Returns the numbers in each of n_shards shards of an exponent plane: whole blocks, fewer in the last shard. A matrix
// with few numbers has fewer shards.
size_t shard_numbers(size_t n, size_t n_shards);

// The vectors of this processor; all give the same bytes.
enum class Simd : uint8_t { SCALAR, NEON, AVX2, AVX512 };

bool has_simd(Simd simd);
Simd best_simd();

// Splits raw [n * number_bytes] into e [n] and sm [sm_bytes]. Not for BYTES.
void split(Numbers type, const uint8_t * raw, size_t n, uint8_t * e, uint8_t * sm);

// Merges e [n] and sm [sm_bytes] into raw [n * number_bytes]. Not for BYTES. Ignores bits of e beyond the exponents.
//
// e may be at the end of raw, and also sm if n is whole blocks: each block is read before anything is written over it.
void merge(Numbers type, const uint8_t * e, const uint8_t * sm, size_t n, uint8_t * raw, Simd simd = best_simd());

} // namespace pyorch
