// Encodes and decodes the bytes of a plane for a pack.
//
// `table` is for exponents, of which few values are common: the 7 commonest of a chunk have a code of three bits, the
// others an escape. A chunk of n exponents is stored as
//
//     [8]                the exponents of codes 0 to 6, and a zero
//     [ceil(n / 64)][24] for 64 exponents, three words of 64 bits: bit 0, 1 and 2 of each code; zeros after the last
//     [escapes]          the exponents of code 7, in order
//
// These functions never read or write out of bounds, however damaged their input is.

#pragma once

#include "codecs/bit_planes.h"

#include <string>
#include <vector>

namespace pyorch {

// The numbers of the format of packs (docs/reference/packs.md). 2 was lz4, and stays unused.
enum class PlaneCodec : uint8_t { STORED = 0, ZSTD = 1, TABLE = 3, NIBBLE = 4 };

inline constexpr int FORMER_LZ4     = 2;
inline constexpr int N_PLANE_CODECS = 5;

const char * name_of(PlaneCodec codec);

// Encodes raw [n], and replaces `to`. level: for zstd 1 to 22 and below 0, 0 for its default; for nibble, which encodes
// whole matrices (nibble.h), the numbers of a row. Returns false if the result would not be smaller; then `to` is
// undefined.
bool encode(PlaneCodec codec, int level, const uint8_t * raw, size_t n, std::vector<uint8_t> & to);

// Decodes stored [stored_bytes] to raw [n]. Returns false if the input is damaged; then raw is undefined.
bool decode(
    PlaneCodec codec, const uint8_t * stored, size_t stored_bytes, uint8_t * raw, size_t n, Simd simd = best_simd());

// Decodes exponents and merges them with their signs and mantissas, in one pass if the codec allows it; otherwise the
// exponents are at the end of raw in between. Inputs: e_stored [e_bytes], which are n exponents, and sm [sm_bytes(type,
// n)]. raw [n * number_bytes] overlaps neither. Returns false as decode() does; then raw is undefined.
bool recover(Numbers type, PlaneCodec codec, const uint8_t * e_stored, size_t e_bytes, const uint8_t * sm, size_t n,
    uint8_t * raw, Simd simd = best_simd());

} // namespace pyorch
