#if defined(__x86_64__)

#include "codecs/plane_kernels.h"

#include <cstring>
#include <immintrin.h>

#define VECTORS __attribute__((target("avx2,bmi,popcnt")))
#define INLINE_VECTORS VECTORS inline __attribute__((always_inline))

namespace pyorch {
namespace {

INLINE_VECTORS __m256i load(const uint8_t * from) { return _mm256_loadu_si256((const __m256i *) from); }

INLINE_VECTORS void store(uint8_t * to, __m256i bytes) { _mm256_storeu_si256((__m256i *) to, bytes); }

// Combines two bytes each to 16 numbers of 16 bits.
INLINE_VECTORS __m256i words(__m128i low, __m128i high) {
    return _mm256_or_si256(_mm256_cvtepu8_epi16(low), _mm256_slli_epi16(_mm256_cvtepu8_epi16(high), 8));
}

// Combines exponents and sign << 7 | mantissa to 16 numbers of 16 bits.
INLINE_VECTORS __m256i bf16(__m128i e, __m128i sm) {
    const __m256i exponents = _mm256_slli_epi16(_mm256_cvtepu8_epi16(e), 7);
    const __m256i mantissas = _mm256_cvtepu8_epi16(sm);
    const __m256i signs     = _mm256_and_si256(_mm256_slli_epi16(mantissas, 8), _mm256_set1_epi16((short) 0x8000));
    return _mm256_or_si256(_mm256_or_si256(_mm256_and_si256(mantissas, _mm256_set1_epi16(0x7f)), exponents), signs);
}

// Expands 32 bits to bytes: `value` or 0.
INLINE_VECTORS __m256i bytes_of(uint32_t bits, char value) {
    const __m256i spread = _mm256_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit   = _mm256_set1_epi64x((long long) 0x8040201008040201ull);
    const __m256i bytes = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int) bits), spread), bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(bytes, bit), _mm256_set1_epi8(value));
}

VECTORS void merge_bf16(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += PLANE_BLOCK, raw += 2 * PLANE_BLOCK) {
        const __m256i block[2] = { load(sm), load(sm + 32) };
        for (int half = 0; half < 2; ++half) {
            const __m256i exponents = load(e + 32 * half);
            store(raw + 64 * half, bf16(_mm256_castsi256_si128(exponents), _mm256_castsi256_si128(block[half])));
            store(raw + 64 * half + 32,
                bf16(_mm256_extracti128_si256(exponents, 1), _mm256_extracti128_si256(block[half], 1)));
        }
    }
}

VECTORS void merge_f16(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    const __m256i five = _mm256_set1_epi8(0x1f);
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += PLANE_BLOCK + 24, raw += 2 * PLANE_BLOCK) {
        const __m256i low[2] = { load(sm), load(sm + 32) };
        uint32_t      bits[6];
        memcpy(bits, sm + PLANE_BLOCK, sizeof(bits));
        for (int half = 0; half < 2; ++half) {
            const __m256i exponents = _mm256_slli_epi16(_mm256_and_si256(load(e + 32 * half), five), 2);
            const __m256i mantissas = _mm256_or_si256(bytes_of(bits[half], 1), bytes_of(bits[2 + half], 2));
            const __m256i high =
                _mm256_or_si256(_mm256_or_si256(exponents, mantissas), bytes_of(bits[4 + half], (char) 0x80));
            store(raw + 64 * half, words(_mm256_castsi256_si128(low[half]), _mm256_castsi256_si128(high)));
            store(
                raw + 64 * half + 32, words(_mm256_extracti128_si256(low[half], 1), _mm256_extracti128_si256(high, 1)));
        }
    }
}

INLINE_VECTORS void store_f32(__m256i low, __m256i high, uint8_t * raw) {
    store(raw,
        _mm256_or_si256(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(low)),
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(high)), 16)));
    store(raw + 32,
        _mm256_or_si256(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(low, 1)),
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(high, 1)), 16)));
}

VECTORS void merge_f32(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += 3 * PLANE_BLOCK, raw += 4 * PLANE_BLOCK) {
        const __m256i first[2]  = { load(sm), load(sm + 32) };
        const __m256i second[2] = { load(sm + PLANE_BLOCK), load(sm + PLANE_BLOCK + 32) };
        const __m256i third[2]  = { load(sm + 2 * PLANE_BLOCK), load(sm + 2 * PLANE_BLOCK + 32) };
        for (int half = 0; half < 2; ++half) {
            const __m256i exponents = load(e + 32 * half);
            store_f32(words(_mm256_castsi256_si128(first[half]), _mm256_castsi256_si128(second[half])),
                bf16(_mm256_castsi256_si128(exponents), _mm256_castsi256_si128(third[half])), raw + 128 * half);
            store_f32(words(_mm256_extracti128_si256(first[half], 1), _mm256_extracti128_si256(second[half], 1)),
                bf16(_mm256_extracti128_si256(exponents, 1), _mm256_extracti128_si256(third[half], 1)),
                raw + 128 * half + 64);
        }
    }
}

VECTORS const uint8_t * lookup(const uint8_t * table, const uint8_t * codes, size_t n_blocks, const uint8_t * escapes,
    const uint8_t * end, uint8_t * e) {
    const __m256i exponents_of = _mm256_broadcastsi128_si256(_mm_loadl_epi64((const __m128i *) table));
    for (; n_blocks > 0; --n_blocks, codes += CODE_BYTES, e += PLANE_BLOCK) {
        uint32_t bits[6];
        memcpy(bits, codes, sizeof(bits));
        for (int half = 0; half < 2; ++half) {
            const __m256i code = _mm256_or_si256(
                _mm256_or_si256(bytes_of(bits[half], 1), bytes_of(bits[2 + half], 2)), bytes_of(bits[4 + half], 4));
            store(e + 32 * half, _mm256_shuffle_epi8(exponents_of, code));
            uint32_t escaped = bits[half] & bits[2 + half] & bits[4 + half];
            if (end - escapes < _mm_popcnt_u32(escaped)) {
                return nullptr;
            }
            for (; escaped != 0; escaped = _blsr_u32(escaped)) {
                e[32 * half + _tzcnt_u32(escaped)] = *escapes++;
            }
        }
    }
    return escapes;
}

VECTORS void nibbles(const uint8_t * exponents, const uint8_t * blocks, size_t n_blocks, uint8_t * rows) {
    const __m256i four   = _mm256_set1_epi8(0xf);
    const __m256i sign   = _mm256_set1_epi8((char) 0x80);
    const __m128i e      = _mm_loadu_si128((const __m128i *) exponents);
    const __m256i high_e = _mm256_broadcastsi128_si256(_mm_and_si128(_mm_srli_epi16(e, 1), _mm_set1_epi8(0x7f)));
    const __m256i low_e  = _mm256_broadcastsi128_si256(_mm_and_si128(_mm_slli_epi16(e, 7), _mm_set1_epi8((char) 0x80)));
    for (; n_blocks > 0; --n_blocks, blocks += NIBBLE_BLOCK_BYTES, rows += 2 * PLANE_BLOCK) {
        const __m256i both    = load(blocks);
        const __m256i code[2] = { _mm256_and_si256(both, four), _mm256_and_si256(_mm256_srli_epi16(both, 4), four) };
        for (int half = 0; half < 2; ++half) {
            const __m256i sm   = load(blocks + 32 + 32 * half);
            const __m256i high = _mm256_or_si256(_mm256_and_si256(sm, sign), _mm256_shuffle_epi8(high_e, code[half]));
            const __m256i low  = _mm256_or_si256(_mm256_andnot_si256(sign, sm), _mm256_shuffle_epi8(low_e, code[half]));
            store(rows + 64 * half, _mm256_unpacklo_epi8(low, high));
            store(rows + 64 * half + 32, _mm256_unpackhi_epi8(low, high));
        }
    }
}

} // namespace

const PlaneKernels & avx2_kernels() {
    static const PlaneKernels kernels = { merge_bf16, merge_f16, merge_f32, lookup, nibbles };
    return kernels;
}

} // namespace pyorch

#endif
