// How the bytes of a plane are stored in a pack, and how they come back.
//
// `table` is for exponents, of which a few make up nearly all: the 7 commonest of a chunk have a code of three bits,
// the others an escape. A chunk of n exponents is stored as
//
//     [8]                the exponents of codes 0 to 6, and a zero
//     [ceil(n / 64)][24] of 64 exponents, three words of 64 bits: bit 0, 1 and 2 of each code; zeros behind the last
//     [escapes]          the exponents of code 7, in order
//
// No bytes that are given to these functions, however damaged, make them read or write out of bounds.

#pragma once

#include "codecs/bit_planes.h"

#include <string>
#include <vector>

namespace pyorch {

// Numbers are those of the format of packs (docs/reference/packs.md), where 2 was lz4: no other codec gets that number.
enum class PlaneCodec : uint8_t { STORED = 0, ZSTD = 1, TABLE = 3, NIBBLE = 4 };

inline constexpr int FORMER_LZ4     = 2;
inline constexpr int N_PLANE_CODECS = 5;

const char * name_of(PlaneCodec codec);

// raw [n] -> what is stored of it, replacing `to`. level: of zstd, 1 to 22 and below 0, 0: its default; for nibble, which
// is for whole matrices (nibble.h), numbers of a row. False where the codec cannot make it smaller: to is of no use
// then.
bool encode(PlaneCodec codec, int level, const uint8_t * raw, size_t n, std::vector<uint8_t> & to);

// stored [stored_bytes] -> raw [n]. False if that is not what is stored there: raw holds anything then.
bool decode(
    PlaneCodec codec, const uint8_t * stored, size_t stored_bytes, uint8_t * raw, size_t n, Simd simd = best_simd());

// Exponents decoded and merged with their signs and mantissas, in one pass where the codec allows it; else exponents
// lie at the end of raw in between. e_stored [e_bytes]: of n exponents; sm [sm_bytes(type, n)] -> raw [n *
// number_bytes], which overlaps neither. False as decode(); raw holds anything then.
bool recover(Numbers type, PlaneCodec codec, const uint8_t * e_stored, size_t e_bytes, const uint8_t * sm, size_t n,
    uint8_t * raw, Simd simd = best_simd());

} // namespace pyorch
