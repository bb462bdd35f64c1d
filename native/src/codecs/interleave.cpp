#include "codecs/interleave.h"

#include "codecs/bit_planes.h"

#include <cstring>

#if defined(__x86_64__)

#include <immintrin.h>

#define VECTORS __attribute__((target("avx2")))
#define INLINE_VECTORS VECTORS inline __attribute__((always_inline))

namespace pyorch {
namespace {

INLINE_VECTORS __m128i load16(const uint8_t * from) { return _mm_loadu_si128((const __m128i *) from); }
INLINE_VECTORS __m256i load32(const uint8_t * from) { return _mm256_loadu_si256((const __m256i *) from); }
INLINE_VECTORS void    store16(uint8_t * to, __m128i bytes) { _mm_storeu_si128((__m128i *) to, bytes); }
INLINE_VECTORS void    store32(uint8_t * to, __m256i bytes) { _mm256_storeu_si256((__m256i *) to, bytes); }

// Interleaves n_bytes (a multiple of 32) of numbers of 8 rows: the first 8 bytes of all rows, then the next 8 bytes.
INLINE_VECTORS void interleave_numbers(const uint8_t * rows, size_t row_bytes, size_t n_bytes, uint8_t * to) {
    for (size_t at = 0; at < n_bytes; at += 32, to += 256) {
        for (int half = 0; half < 2; ++half) { // rows 0 to 3, rows 4 to 7
            const uint8_t * four   = rows + (size_t) (4 * half) * row_bytes + at;
            const __m256i   r[4]   = { load32(four), load32(four + row_bytes), load32(four + 2 * row_bytes),
                load32(four + 3 * row_bytes) };
            const __m256i   even01 = _mm256_unpacklo_epi64(r[0], r[1]), even23 = _mm256_unpacklo_epi64(r[2], r[3]);
            const __m256i   odd01 = _mm256_unpackhi_epi64(r[0], r[1]), odd23 = _mm256_unpackhi_epi64(r[2], r[3]);
            store32(to + 32 * half, _mm256_permute2x128_si256(even01, even23, 0x20));
            store32(to + 64 + 32 * half, _mm256_permute2x128_si256(odd01, odd23, 0x20));
            store32(to + 128 + 32 * half, _mm256_permute2x128_si256(even01, even23, 0x31));
            store32(to + 192 + 32 * half, _mm256_permute2x128_si256(odd01, odd23, 0x31));
        }
    }
}

// Writes d and dmin of 8 rows (a pair of 16 bits in each word, rows 0 to 3 in the low half): all d, then all dmin.
INLINE_VECTORS void interleave_deltas(__m256i pairs, uint8_t * to) {
    const __m256i d = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)), dmin = _mm256_srli_epi32(pairs, 16);
    store32(to, _mm256_permute4x64_epi64(_mm256_packus_epi32(d, dmin), 0xd8));
}

// Writes the scales and minima of four sub-blocks, for rows 0 to 3 (low) and 4 to 7 (high): a word for each row with a
// byte for each sub-block. Each becomes 12 bytes: 6 bits of the scales and minima of rows 0 to 3, above them the 2 high
// bits of rows 4 to 7, then the 4 low bits of rows 4 to 7.
INLINE_VECTORS void interleave_scales(__m256i scales, __m256i minima, uint8_t * to) {
    const __m256i by_block = _mm256_setr_epi8(
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    scales                  = _mm256_shuffle_epi8(scales, by_block);
    minima                  = _mm256_shuffle_epi8(minima, by_block);
    const __m128i high_bits = _mm_set1_epi8(0x30), low_bits = _mm_set1_epi8(0x0f);
    const __m128i s0 = _mm256_castsi256_si128(scales), s4 = _mm256_extracti128_si256(scales, 1);
    const __m128i m0 = _mm256_castsi256_si128(minima), m4 = _mm256_extracti128_si256(minima, 1);
    const __m128i a = _mm_or_si128(s0, _mm_slli_epi32(_mm_and_si128(s4, high_bits), 2));
    const __m128i b = _mm_or_si128(m0, _mm_slli_epi32(_mm_and_si128(m4, high_bits), 2));
    const __m128i c = _mm_or_si128(_mm_and_si128(s4, low_bits), _mm_slli_epi32(_mm_and_si128(m4, low_bits), 4));
    // Words a0 b0 c0 a1, b1 c1 a2 b2, c2 a3 b3 c3.
    const __m128i ab = _mm_unpacklo_epi32(a, b), ab_high = _mm_unpackhi_epi32(a, b);
    const __m128i c0_a1 = _mm_unpacklo_epi32(c, _mm_srli_si128(a, 4));
    const __m128i b1_c1 = _mm_srli_si128(_mm_unpacklo_epi32(b, c), 8);
    const __m128i c2_a3 = _mm_unpackhi_epi32(c, _mm_srli_si128(_mm_unpackhi_epi32(a, a), 4));
    const __m128i b3_c3 = _mm_srli_si128(_mm_unpackhi_epi32(b, c), 8);
    store16(to, _mm_unpacklo_epi64(ab, c0_a1));
    store16(to + 16, _mm_unpacklo_epi64(b1_c1, ab_high));
    store16(to + 32, _mm_unpacklo_epi64(c2_a3, b3_c3));
}

// A super-block: d and dmin, 12 bytes of scales and minima of 6 bits, 128 bytes of numbers.
VECTORS void q4_k(const uint8_t * rows, size_t row_bytes, size_t n_blocks, uint8_t * to) {
    constexpr size_t HEAD = 16, BLOCK = HEAD + 128;
    const __m256i    six_bits = _mm256_set1_epi8(63), four_bits = _mm256_set1_epi8(15), two_bits = _mm256_set1_epi8(48);
    for (; n_blocks > 0; --n_blocks, rows += BLOCK, to += INTERLEAVED_ROWS * BLOCK) {
        __m256i heads[4]; // rows i and i + 4
        for (size_t i = 0; i < 4; ++i) {
            heads[i] = _mm256_inserti128_si256(
                _mm256_castsi128_si256(load16(rows + i * row_bytes)), load16(rows + (i + 4) * row_bytes), 1);
        }
        const __m256i low01  = _mm256_unpacklo_epi32(heads[0], heads[1]);
        const __m256i low23  = _mm256_unpacklo_epi32(heads[2], heads[3]);
        const __m256i high01 = _mm256_unpackhi_epi32(heads[0], heads[1]);
        const __m256i high23 = _mm256_unpackhi_epi32(heads[2], heads[3]);
        const __m256i first  = _mm256_unpackhi_epi64(low01, low23); // the first four of the 12 bytes
        const __m256i second = _mm256_unpacklo_epi64(high01, high23);
        const __m256i third  = _mm256_unpackhi_epi64(high01, high23);
        interleave_deltas(_mm256_unpacklo_epi64(low01, low23), to);
        interleave_scales(_mm256_and_si256(first, six_bits), _mm256_and_si256(second, six_bits), to + 32);
        interleave_scales(_mm256_or_si256(_mm256_and_si256(third, four_bits),
                              _mm256_and_si256(_mm256_srli_epi32(first, 2), two_bits)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(third, 4), four_bits),
                _mm256_and_si256(_mm256_srli_epi32(second, 2), two_bits)),
            to + 80);
        interleave_numbers(rows + HEAD, row_bytes, 128, to + INTERLEAVED_ROWS * HEAD);
    }
}

// A super-block: 16 bytes of scales and minima of 4 bits, 64 bytes of numbers, d and dmin.
VECTORS void q2_k(const uint8_t * rows, size_t row_bytes, size_t n_blocks, uint8_t * to) {
    constexpr size_t SCALES = 16, NUMBERS = 64, BLOCK = SCALES + NUMBERS + 4;
    for (; n_blocks > 0; --n_blocks, rows += BLOCK, to += INTERLEAVED_ROWS * BLOCK) {
        uint32_t deltas[INTERLEAVED_ROWS];
        __m128i  s[INTERLEAVED_ROWS];
        for (size_t row = 0; row < (size_t) INTERLEAVED_ROWS; ++row) {
            memcpy(&deltas[row], rows + row * row_bytes + SCALES + NUMBERS, sizeof(deltas[row]));
            s[row] = load16(rows + row * row_bytes);
        }
        interleave_deltas(load32((const uint8_t *) deltas), to);
        // Pairs of bytes: the pair of each row, pair by pair.
        for (int half = 0; half < 2; ++half) {
            __m128i pairs[4]; // rows 2 i and 2 i + 1
            for (int i = 0; i < 4; ++i) {
                pairs[i] =
                    half ? _mm_unpackhi_epi16(s[2 * i], s[2 * i + 1]) : _mm_unpacklo_epi16(s[2 * i], s[2 * i + 1]);
            }
            const __m128i a = _mm_unpacklo_epi32(pairs[0], pairs[1]), b = _mm_unpacklo_epi32(pairs[2], pairs[3]);
            const __m128i c = _mm_unpackhi_epi32(pairs[0], pairs[1]), d = _mm_unpackhi_epi32(pairs[2], pairs[3]);
            uint8_t *     at = to + 32 + 64 * half;
            store16(at, _mm_unpacklo_epi64(a, b));
            store16(at + 16, _mm_unpackhi_epi64(a, b));
            store16(at + 32, _mm_unpacklo_epi64(c, d));
            store16(at + 48, _mm_unpackhi_epi64(c, d));
        }
        interleave_numbers(rows + SCALES, row_bytes, NUMBERS, to + 160);
    }
}

} // namespace

Interleave interleave_q4_k() { return has_simd(Simd::AVX2) ? q4_k : nullptr; }
Interleave interleave_q2_k() { return has_simd(Simd::AVX2) ? q2_k : nullptr; }

} // namespace pyorch

#else

namespace pyorch {

Interleave interleave_q4_k() { return nullptr; }
Interleave interleave_q2_k() { return nullptr; }

} // namespace pyorch

#endif
