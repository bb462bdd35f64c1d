#include "kernels/candidates.h"

#if defined(__x86_64__)

#include <algorithm>
#include <cstring>
#include <immintrin.h>
#include <vector>

#define VECTORS __attribute__((target("avx2,f16c,fma")))
#define INLINE_VECTORS VECTORS inline __attribute__((always_inline))

namespace pyorch {
namespace {

constexpr int64_t GROUP = 8; // interleaved rows

template <class T>
T read(const uint8_t * from) {
    T value;
    memcpy(&value, from, sizeof(value));
    return value;
}

INLINE_VECTORS __m256i load32(const uint8_t * from) { return _mm256_loadu_si256((const __m256i *) from); }
INLINE_VECTORS __m256i low_bits(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
INLINE_VECTORS __m256i high_bits(__m256i bytes) { return low_bits(_mm256_srli_epi16(bytes, 4)); }

// Eight bytes of an input, once for each of four rows.
INLINE_VECTORS __m256i four_times(const uint8_t * bytes) { return _mm256_set1_epi64x(read<int64_t>(bytes)); }

INLINE_VECTORS __m256 to_floats(const uint8_t * eight) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) eight));
}

INLINE_VECTORS float to_float(const uint8_t * half) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(read<uint16_t>(half))));
}

// Sums of rows 0 to 3 and of rows 4 to 7, two parts each, become sums of rows 0 1 4 5 2 3 6 7. The order is its own
// inverse.
INLINE_VECTORS __m256i add_pairs(__m256i first, __m256i second) { return _mm256_hadd_epi32(first, second); }
INLINE_VECTORS __m256  reorder(__m256 rows) {
    return _mm256_permutevar8x32_ps(rows, _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7));
}

//
// blocks of 32 numbers of four bits, with one scale for a row
//

constexpr size_t Q8_0_BYTES = 34; // an input's block: a half, 32 bytes

// Four vectors of weights times the 32 numbers of an input's block: two parts for each of four rows.
struct Unsigned { // at most 24, so that eight products fit 16 bits
    INLINE_VECTORS static __m256i multiply(const __m256i * weights, const __m256i * numbers) {
        const __m256i a = _mm256_maddubs_epi16(weights[0], numbers[0]);
        const __m256i b = _mm256_maddubs_epi16(weights[1], numbers[1]);
        const __m256i c = _mm256_maddubs_epi16(weights[2], numbers[2]);
        const __m256i d = _mm256_maddubs_epi16(weights[3], numbers[3]);
        return _mm256_madd_epi16(
            _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d)), _mm256_set1_epi16(1));
    }
};

struct Signed {
    INLINE_VECTORS static __m256i multiply(const __m256i * weights, const __m256i * numbers) {
        __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m256i pairs =
                _mm256_maddubs_epi16(_mm256_abs_epi8(weights[i]), _mm256_sign_epi8(numbers[i], weights[i]));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        return sum;
    }
};

template <class Table>
struct ByTable {
    INLINE_VECTORS static __m256i numbers(__m256i four_bits) {
        const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) Table::VALUES));
        return _mm256_shuffle_epi8(table, four_bits);
    }
};

// Weights above zero by OFFSET, which the sum of the input's block takes off.
struct Q4_0 : Unsigned {
    static constexpr size_t  HEAD   = 16; // eight halves
    static constexpr int32_t OFFSET = 8;

    INLINE_VECTORS static __m256 scales(const uint8_t * head) { return to_floats(head); }
    // The order of repacked weights has bit 3 of each number turned, which makes two's complement of it.
    INLINE_VECTORS static __m256i numbers(__m256i four_bits) {
        return _mm256_xor_si256(four_bits, _mm256_set1_epi8(8));
    }
};

struct Mxfp4 : Unsigned, ByTable<Mxfp4> {
    static constexpr size_t  HEAD       = 8; // eight exponents
    static constexpr int32_t OFFSET     = 12;
    static constexpr uint8_t VALUES[16] = { 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 };

    // 2^(e - 128), as llama.cpp writes it: below 2^-126 it has no exponent.
    INLINE_VECTORS static __m256 scales(const uint8_t * head) {
        const __m256i e     = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(read<int64_t>(head)));
        const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        const __m256i large = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(large, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
    }
};

struct Iq4Nl : Signed, ByTable<Iq4Nl> {
    static constexpr size_t  HEAD       = 16;
    static constexpr int32_t OFFSET     = 0;
    static constexpr int8_t  VALUES[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

    INLINE_VECTORS static __m256 scales(const uint8_t * head) { return to_floats(head); }
};

struct BlockFacts {
    int32_t offset; // to take off the sums
    float   scale;
};

VECTORS void describe(const uint8_t * input, int64_t n_blocks, int32_t offset, BlockFacts * facts) {
    const __m256i ones = _mm256_set1_epi8(1);
    for (int64_t b = 0; b < n_blocks; ++b, input += Q8_0_BYTES) {
        const __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(ones, load32(input + 2)), _mm256_set1_epi16(1));
        const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        const __m128i two  = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
        facts[b]           = { offset * (_mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1)), to_float(input) };
    }
}

// Eight rows times N inputs.
template <class Format, int N>
VECTORS void nibble_tile(const uint8_t * rows, int64_t n_blocks, const uint8_t * const * inputs,
    const BlockFacts * facts, float * const * outputs) {
    __m256 sums[N];
    for (int j = 0; j < N; ++j) {
        sums[j] = _mm256_setzero_ps();
    }
    for (int64_t block = 0; block < n_blocks; ++block, rows += Format::HEAD + 128) {
        const __m256 scales = reorder(Format::scales(rows));
        __m256i      totals[2][N];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) { // rows 0 to 3, rows 4 to 7
            const __m256i bytes0     = load32(rows + Format::HEAD + 32 * half);
            const __m256i bytes1     = load32(rows + Format::HEAD + 32 * half + 64);
            const __m256i weights[4] = { Format::numbers(low_bits(bytes0)), Format::numbers(low_bits(bytes1)),
                Format::numbers(high_bits(bytes0)), Format::numbers(high_bits(bytes1)) };
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) {
                const uint8_t * input      = inputs[j] + block * Q8_0_BYTES + 2;
                const __m256i   numbers[4] = { four_times(input), four_times(input + 8), four_times(input + 16),
                    four_times(input + 24) };
                totals[half][j]            = Format::multiply(weights, numbers);
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
            const BlockFacts fact = facts[j * n_blocks + block];
            const __m256i    total =
                _mm256_sub_epi32(add_pairs(totals[0][j], totals[1][j]), _mm256_set1_epi32(fact.offset));
            sums[j] =
                _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(scales, _mm256_set1_ps(fact.scale)), sums[j]);
        }
    }
    for (int j = 0; j < N; ++j) {
        _mm256_storeu_ps(outputs[j], reorder(sums[j]));
    }
}

constexpr int WIDTH = 4; // inputs of a tile at most

template <class Format>
VECTORS void nibble_kernel(const Product & p) {
    static const decltype(&nibble_tile<Format, 1>) tiles[WIDTH + 1] = { nullptr, nibble_tile<Format, 1>,
        nibble_tile<Format, 2>, nibble_tile<Format, 3>, nibble_tile<Format, 4> };
    const int64_t                                  n_blocks         = p.n_in / 32;
    static thread_local std::vector<BlockFacts>    facts;
    facts.resize(std::max<size_t>(facts.size(), p.n_inputs * n_blocks));
    for (int j = 0; j < p.n_inputs; ++j) {
        describe(p.inputs[j], n_blocks, Format::OFFSET, facts.data() + j * n_blocks);
    }
    for (int64_t row = 0; row < p.n_rows; row += GROUP) {
        const uint8_t * rows = p.rows + (size_t) (row / GROUP * n_blocks) * (Format::HEAD + 128);
        for (int j = 0; j < p.n_inputs; j += WIDTH) {
            const int n = std::min(WIDTH, p.n_inputs - j);
            float *   outputs[WIDTH];
            for (int i = 0; i < n; ++i) {
                outputs[i] = p.outputs[j + i] + row;
            }
            tiles[n](rows, n_blocks, p.inputs + j, facts.data() + j * n_blocks, outputs);
        }
    }
}

//
// Q4_K: super-blocks of 256 numbers of four bits; each of its eight blocks has a scale and a minimum of six bits
//

constexpr size_t Q8_K_BYTES = 4 + 256 + 32; // an input's super-block: a float, 256 bytes, 16 sums of 16 numbers
constexpr size_t Q4_K_GROUP = 8 * 144;      // d [8], dmin [8], scales and minima [8][12], numbers [1024]

// Eight scales and eight minima of a block, a byte each.
INLINE_VECTORS void scales_of(const uint8_t * twelve, uint64_t & scales, uint64_t & minima) {
    const uint32_t a = read<uint32_t>(twelve), b = read<uint32_t>(twelve + 4), c = read<uint32_t>(twelve + 8);
    scales = (a & 0x3f3f3f3fu) | (uint64_t) ((c & 0x0f0f0f0fu) | (a >> 6 & 0x03030303u) << 4) << 32;
    minima = (b & 0x3f3f3f3fu) | (uint64_t) ((c >> 4 & 0x0f0f0f0fu) | (b >> 6 & 0x03030303u) << 4) << 32;
}

// Four scales, each as 16 bits, four times.
INLINE_VECTORS __m256i repeat(uint32_t scales) {
    const __m256i each = _mm256_setr_epi8(
        0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 8, 9, 8, 9, 8, 9, 0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 8, 9, 8, 9, 8, 9);
    return _mm256_shuffle_epi8(_mm256_cvtepu8_epi64(_mm_cvtsi32_si128((int) scales)), each);
}

template <int N>
VECTORS void q4_k_tile(
    const uint8_t * rows, int64_t n_blocks, const uint8_t * const * inputs, float * const * outputs) {
    __m256 sums[N], minimum_sums[N];
    for (int j = 0; j < N; ++j) {
        sums[j] = minimum_sums[j] = _mm256_setzero_ps();
    }
    for (int64_t block = 0; block < n_blocks; ++block, rows += Q4_K_GROUP) {
        uint64_t scales[8], minima[8];
        for (int i = 0; i < 8; ++i) {
            scales_of(rows + 32 + 12 * i, scales[i], minima[i]);
        }
        __m256i totals[2][N];
        for (int half = 0; half < 2; ++half) { // rows 0 to 3, rows 4 to 7
            for (int j = 0; j < N; ++j) {
                totals[half][j] = _mm256_setzero_si256();
            }
            for (int part = 0; part < 4; ++part) { // two blocks of 32 numbers
                const uint8_t * numbers = rows + 128 + 256 * part + 32 * half;
                const __m256i   first   = repeat((uint32_t) (scales[2 * part] >> 32 * half));
                const __m256i   second  = repeat((uint32_t) (scales[2 * part + 1] >> 32 * half));
                __m256i         sum0[N], sum1[N];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    const __m256i bytes = load32(numbers + 64 * i), low = low_bits(bytes), high = high_bits(bytes);
#pragma GCC unroll 4
                    for (int j = 0; j < N; ++j) {
                        const uint8_t * input = inputs[j] + block * Q8_K_BYTES + 4 + 64 * part + 8 * i;
                        const __m256i   a     = _mm256_maddubs_epi16(low, four_times(input));
                        const __m256i   b     = _mm256_maddubs_epi16(high, four_times(input + 32));
                        sum0[j]               = i == 0 ? a : _mm256_add_epi16(sum0[j], a);
                        sum1[j]               = i == 0 ? b : _mm256_add_epi16(sum1[j], b);
                    }
                }
#pragma GCC unroll 4
                for (int j = 0; j < N; ++j) { // sums of eight products are below 2^15
                    totals[half][j] = _mm256_add_epi32(totals[half][j],
                        _mm256_add_epi32(_mm256_madd_epi16(sum0[j], first), _mm256_madd_epi16(sum1[j], second)));
                }
            }
        }
        const __m256 d = reorder(to_floats(rows)), dmin = to_floats(rows + 16);
        for (int j = 0; j < N; ++j) {
            const uint8_t * input = inputs[j] + block * Q8_K_BYTES;
            const __m128i   pairs = _mm_hadd_epi16(
                _mm_loadu_si128((const __m128i *) (input + 260)), _mm_loadu_si128((const __m128i *) (input + 276)));
            int32_t of_parts[4];
            _mm_storeu_si128((__m128i *) of_parts, pairs);
            __m256i minimum_sum = _mm256_setzero_si256();
            for (int part = 0; part < 4; ++part) {
                const __m256i both = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(
                    _mm_cvtsi64_si128((int64_t) minima[2 * part]), _mm_cvtsi64_si128((int64_t) minima[2 * part + 1])));
                minimum_sum = _mm256_add_epi32(minimum_sum, _mm256_madd_epi16(_mm256_set1_epi32(of_parts[part]), both));
            }
            const __m256 scale = _mm256_set1_ps(read<float>(input));
            sums[j]            = _mm256_fmadd_ps(
                _mm256_cvtepi32_ps(add_pairs(totals[0][j], totals[1][j])), _mm256_mul_ps(d, scale), sums[j]);
            minimum_sums[j] =
                _mm256_fmadd_ps(_mm256_cvtepi32_ps(minimum_sum), _mm256_mul_ps(dmin, scale), minimum_sums[j]);
        }
    }
    for (int j = 0; j < N; ++j) {
        _mm256_storeu_ps(outputs[j], _mm256_sub_ps(reorder(sums[j]), minimum_sums[j]));
    }
}

VECTORS void q4_k_kernel(const Product & p) {
    static const decltype(&q4_k_tile<1>) tiles[WIDTH + 1] = { nullptr, q4_k_tile<1>, q4_k_tile<2>, q4_k_tile<3>,
        q4_k_tile<4> };
    const int64_t                        n_blocks         = p.n_in / 256;
    for (int64_t row = 0; row < p.n_rows; row += GROUP) {
        for (int j = 0; j < p.n_inputs; j += WIDTH) {
            const int n = std::min(WIDTH, p.n_inputs - j);
            float *   outputs[WIDTH];
            for (int i = 0; i < n; ++i) {
                outputs[i] = p.outputs[j + i] + row;
            }
            tiles[n](p.rows + (size_t) (row / GROUP * n_blocks) * Q4_K_GROUP, n_blocks, p.inputs + j, outputs);
        }
    }
}

} // namespace

Kernel avx2_integer_kernel(ggml_type type, bool repacked) {
    if (!repacked || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        return nullptr;
    }
    switch (type) {
    case GGML_TYPE_Q4_0: return nibble_kernel<Q4_0>;
    case GGML_TYPE_IQ4_NL: return nibble_kernel<Iq4Nl>;
    case GGML_TYPE_MXFP4: return nibble_kernel<Mxfp4>;
    case GGML_TYPE_Q4_K: return q4_k_kernel;
    default: return nullptr;
    }
}

} // namespace pyorch

#else

namespace pyorch {

Kernel avx2_integer_kernel(ggml_type, bool) { return nullptr; }

} // namespace pyorch

#endif
