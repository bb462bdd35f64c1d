#if defined(__x86_64__)

#include "codecs/plane_kernels.h"

#include <cstring>
#include <immintrin.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized" // GCC 12 warns of undefined vectors in its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define VECTORS __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,bmi2,popcnt")))
#define INLINE_VECTORS VECTORS inline __attribute__((always_inline))

namespace pyorch {
namespace {

// Combines two bytes each to 32 numbers of 16 bits.
INLINE_VECTORS __m512i words(__m256i low, __m256i high) {
    return _mm512_or_si512(_mm512_cvtepu8_epi16(low), _mm512_slli_epi16(_mm512_cvtepu8_epi16(high), 8));
}

// Combines exponents and sign << 7 | mantissa to 32 numbers of 16 bits.
INLINE_VECTORS __m512i bf16(__m256i e, __m256i sm) {
    const __m512i exponents = _mm512_slli_epi16(_mm512_cvtepu8_epi16(e), 7);
    const __m512i mantissas = _mm512_cvtepu8_epi16(sm);
    const __m512i signs     = _mm512_and_si512(_mm512_slli_epi16(mantissas, 8), _mm512_set1_epi16((short) 0x8000));
    return _mm512_ternarylogic_epi32(_mm512_and_si512(mantissas, _mm512_set1_epi16(0x7f)), exponents, signs, 0xfe);
}

VECTORS void merge_bf16(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += PLANE_BLOCK, raw += 2 * PLANE_BLOCK) {
        const __m512i exponents = _mm512_loadu_si512(e);
        const __m512i block     = _mm512_loadu_si512(sm);
        _mm512_storeu_si512(raw, bf16(_mm512_castsi512_si256(exponents), _mm512_castsi512_si256(block)));
        _mm512_storeu_si512(
            raw + 64, bf16(_mm512_extracti64x4_epi64(exponents, 1), _mm512_extracti64x4_epi64(block, 1)));
    }
}

VECTORS void merge_f16(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    const __m512i five = _mm512_set1_epi8(0x1f);
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += PLANE_BLOCK + 24, raw += 2 * PLANE_BLOCK) {
        uint64_t bits[3];
        memcpy(bits, sm + PLANE_BLOCK, sizeof(bits));
        const __m512i low       = _mm512_loadu_si512(sm);
        const __m512i exponents = _mm512_slli_epi16(_mm512_and_si512(_mm512_loadu_si512(e), five), 2);
        const __m512i mantissas =
            _mm512_or_si512(_mm512_maskz_set1_epi8(bits[0], 1), _mm512_maskz_set1_epi8(bits[1], 2));
        const __m512i high =
            _mm512_ternarylogic_epi32(exponents, mantissas, _mm512_maskz_set1_epi8(bits[2], (char) 0x80), 0xfe);
        _mm512_storeu_si512(raw, words(_mm512_castsi512_si256(low), _mm512_castsi512_si256(high)));
        _mm512_storeu_si512(raw + 64, words(_mm512_extracti64x4_epi64(low, 1), _mm512_extracti64x4_epi64(high, 1)));
    }
}

INLINE_VECTORS void store_f32(__m512i low, __m512i high, uint8_t * raw) {
    _mm512_storeu_si512(raw,
        _mm512_or_si512(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(low)),
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16)));
    _mm512_storeu_si512(raw + 64,
        _mm512_or_si512(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(low, 1)),
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16)));
}

VECTORS void merge_f32(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += 3 * PLANE_BLOCK, raw += 4 * PLANE_BLOCK) {
        const __m512i exponents = _mm512_loadu_si512(e);
        const __m512i first     = _mm512_loadu_si512(sm);
        const __m512i second    = _mm512_loadu_si512(sm + PLANE_BLOCK);
        const __m512i third     = _mm512_loadu_si512(sm + 2 * PLANE_BLOCK);
        store_f32(words(_mm512_castsi512_si256(first), _mm512_castsi512_si256(second)),
            bf16(_mm512_castsi512_si256(exponents), _mm512_castsi512_si256(third)), raw);
        store_f32(words(_mm512_extracti64x4_epi64(first, 1), _mm512_extracti64x4_epi64(second, 1)),
            bf16(_mm512_extracti64x4_epi64(exponents, 1), _mm512_extracti64x4_epi64(third, 1)), raw + 128);
    }
}

VECTORS const uint8_t * lookup(const uint8_t * table, const uint8_t * codes, size_t n_blocks, const uint8_t * escapes,
    const uint8_t * end, uint8_t * e) {
    const __m512i exponents_of = _mm512_broadcast_i32x4(_mm_loadl_epi64((const __m128i *) table));
    for (; n_blocks > 0; --n_blocks, codes += CODE_BYTES, e += PLANE_BLOCK) {
        uint64_t bits[3];
        memcpy(bits, codes, sizeof(bits));
        const __m512i  code      = _mm512_ternarylogic_epi32(_mm512_maskz_set1_epi8(bits[0], 1),
            _mm512_maskz_set1_epi8(bits[1], 2), _mm512_maskz_set1_epi8(bits[2], 4), 0xfe);
        __m512i        exponents = _mm512_shuffle_epi8(exponents_of, code);
        const uint64_t escaped   = bits[0] & bits[1] & bits[2];
        const size_t   n         = (size_t) _mm_popcnt_u64(escaped);
        if ((size_t) (end - escapes) < n) {
            return nullptr;
        }
        // Reads only the n escapes: later bytes may be out of bounds.
        const __m512i next = _mm512_maskz_loadu_epi8(_bzhi_u64(~0ull, (unsigned) n), escapes);
        exponents          = _mm512_mask_expand_epi8(exponents, escaped, next);
        escapes += n;
        _mm512_storeu_si512(e, exponents);
    }
    return escapes;
}

} // namespace

const PlaneKernels & avx512_kernels() {
    static const PlaneKernels kernels = { merge_bf16, merge_f16, merge_f32, lookup, avx2_kernels().nibbles };
    return kernels;
}

} // namespace pyorch

#endif
