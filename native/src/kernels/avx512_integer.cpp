#include "kernels/candidates.h"

#if defined(__x86_64__)

#include <algorithm>
#include <cstring>
#include <immintrin.h>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized" // GCC 12 warns of vectors that its own header leaves undefined
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define VECTORS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")))
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

INLINE_VECTORS __m512i load64(const uint8_t * from) { return _mm512_loadu_si512(from); }

// Eight bytes of an input, once for each of eight rows.
INLINE_VECTORS __m512i eight_times(const uint8_t * bytes) { return _mm512_set1_epi64(read<int64_t>(bytes)); }

INLINE_VECTORS float to_float(const uint8_t * half) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(read<uint16_t>(half))));
}

INLINE_VECTORS __m512 to_floats(const uint8_t * a, const uint8_t * b) { // 8 halves each
    return _mm512_cvtph_ps(_mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) a)), _mm_loadu_si128((const __m128i *) b), 1));
}

// Sums of pairs: of 8 pairs of a and then of 8 pairs of b.
INLINE_VECTORS __m512i add_pairs(__m512i a, __m512i b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd  = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b));
}

// Outputs of two groups of rows; of the second only if it exists.
INLINE_VECTORS void store(float * to, __m512 sums, bool both) {
    if (both) {
        _mm512_storeu_ps(to, sums);
    } else {
        _mm256_storeu_ps(to, _mm512_castps512_ps256(sums));
    }
}

//
// blocks of 32 numbers of four bits, with one scale for a row
//

constexpr size_t Q8_0_BYTES = 34; // an input's block: a half, 32 bytes

// The bytes of a product are unsigned on one side, so weights are stored above zero by OFFSET, and the sum of the
// input's block takes it off.
struct Q4_0 {
    static constexpr size_t  HEAD   = 16; // eight halves
    static constexpr int32_t OFFSET = 8;

    INLINE_VECTORS static __m512 scales(const uint8_t * a, const uint8_t * b) { return to_floats(a, b); }

    // The order of repacked weights has bit 3 of each number turned, which makes two's complement of it.
    INLINE_VECTORS static __m512i numbers(__m512i bytes) {
        return _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi8(15), _mm512_set1_epi8(8), 0x6a); // (a & b) ^ c
    }
};

template <class Table>
struct ByTable {
    INLINE_VECTORS static __m512i numbers(__m512i bytes) {
        const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) Table::VALUES));
        return _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, _mm512_set1_epi8(15)));
    }
};

struct Iq4Nl : ByTable<Iq4Nl> {
    static constexpr size_t  HEAD       = 16;
    static constexpr int32_t OFFSET     = 128;
    static constexpr uint8_t VALUES[16] = { 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241 };

    INLINE_VECTORS static __m512 scales(const uint8_t * a, const uint8_t * b) { return to_floats(a, b); }
};

struct Mxfp4 : ByTable<Mxfp4> {
    static constexpr size_t  HEAD       = 8; // eight exponents
    static constexpr int32_t OFFSET     = 12;
    static constexpr uint8_t VALUES[16] = { 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 };

    // 2^(e - 128), as llama.cpp writes it: below 2^-126 it has no exponent.
    INLINE_VECTORS static __m512 scales(const uint8_t * a, const uint8_t * b) {
        const __m512i e     = _mm512_cvtepu8_epi32(_mm_set_epi64x(read<int64_t>(b), read<int64_t>(a)));
        const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
        const __m512i large = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        return _mm512_castsi512_ps(
            _mm512_mask_blend_epi32(_mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2)), large, small));
    }
};

// What the blocks of one input take off the sums, and their scales.
struct BlockFacts {
    std::vector<int64_t> offsets; // in the low 32 bits
    std::vector<float>   scales;
};

VECTORS void describe(const uint8_t * input, int64_t n_blocks, int32_t offset, int64_t * offsets, float * scales) {
    const __m256i ones = _mm256_set1_epi8(1);
    for (int64_t b = 0; b < n_blocks; ++b, input += Q8_0_BYTES) {
        const __m256i sums =
            _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, _mm256_loadu_si256((const __m256i *) (input + 2)));
        const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        const __m128i two  = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
        const int32_t sum  = _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
        offsets[b]         = (int64_t) (uint32_t) (-offset * sum);
        scales[b]          = to_float(input);
    }
}

// Sixteen rows, two groups, times N inputs.
template <class Format, int N>
VECTORS void nibble_tile(const uint8_t * a, const uint8_t * b, int64_t n_blocks, const uint8_t * const * inputs,
    const int64_t * offsets, const float * scales, float * const * outputs, bool both) {
    constexpr size_t BLOCK = Format::HEAD + 128;
    __m512           sums[N];
    for (int j = 0; j < N; ++j) {
        sums[j] = _mm512_setzero_ps();
    }
    for (int64_t block = 0; block < n_blocks; ++block, a += BLOCK, b += BLOCK) {
        const __m512  row_scales = Format::scales(a, b);
        const __m512i a0 = load64(a + Format::HEAD), a1 = load64(a + Format::HEAD + 64);
        const __m512i b0 = load64(b + Format::HEAD), b1 = load64(b + Format::HEAD + 64);
        const __m512i wa[4] = { Format::numbers(a0), Format::numbers(a1), Format::numbers(_mm512_srli_epi16(a0, 4)),
            Format::numbers(_mm512_srli_epi16(a1, 4)) };
        const __m512i wb[4] = { Format::numbers(b0), Format::numbers(b1), Format::numbers(_mm512_srli_epi16(b0, 4)),
            Format::numbers(_mm512_srli_epi16(b1, 4)) };
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) {
            const uint8_t * input = inputs[j] + block * Q8_0_BYTES + 2;
            __m512i         sum_a = _mm512_set1_epi64(offsets[j * n_blocks + block]), sum_b = sum_a;
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m512i numbers = eight_times(input + 8 * i);
                sum_a                 = _mm512_dpbusd_epi32(sum_a, wa[i], numbers);
                sum_b                 = _mm512_dpbusd_epi32(sum_b, wb[i], numbers);
            }
            sums[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(add_pairs(sum_a, sum_b)),
                _mm512_mul_ps(row_scales, _mm512_set1_ps(scales[j * n_blocks + block])), sums[j]);
        }
    }
    for (int j = 0; j < N; ++j) {
        store(outputs[j], sums[j], both);
    }
}

template <class Format>
VECTORS void nibble_kernel(const Product & p) {
    constexpr int                                  WIDTH            = 8;
    constexpr size_t                               BLOCK            = Format::HEAD + 128;
    const int64_t                                  n_blocks         = p.n_in / 32;
    static const decltype(&nibble_tile<Format, 1>) tiles[WIDTH + 1] = { nullptr, nibble_tile<Format, 1>,
        nibble_tile<Format, 2>, nibble_tile<Format, 3>, nibble_tile<Format, 4>, nibble_tile<Format, 5>,
        nibble_tile<Format, 6>, nibble_tile<Format, 7>, nibble_tile<Format, 8> };

    static thread_local BlockFacts facts;
    facts.offsets.resize(std::max<size_t>(facts.offsets.size(), p.n_inputs * n_blocks));
    facts.scales.resize(facts.offsets.size());
    for (int j = 0; j < p.n_inputs; ++j) {
        describe(p.inputs[j], n_blocks, Format::OFFSET, facts.offsets.data() + j * n_blocks,
            facts.scales.data() + j * n_blocks);
    }
    for (int64_t row = 0; row < p.n_rows; row += 2 * GROUP) {
        const bool      both = row + GROUP < p.n_rows;
        const uint8_t * a    = p.rows + (size_t) (row / GROUP * n_blocks) * BLOCK;
        const uint8_t * b    = both ? a + n_blocks * BLOCK : a;
        for (int j = 0; j < p.n_inputs; j += WIDTH) {
            const int n = std::min(WIDTH, p.n_inputs - j);
            float *   outputs[WIDTH];
            for (int i = 0; i < n; ++i) {
                outputs[i] = p.outputs[j + i] + row;
            }
            tiles[n](a, b, n_blocks, p.inputs + j, facts.offsets.data() + j * n_blocks,
                facts.scales.data() + j * n_blocks, outputs, both);
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

// Each scale twice as 32 bits: a row's sum has two parts.
INLINE_VECTORS __m512i twice(uint64_t scales) {
    const __m512i low = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128((int64_t) scales));
    return _mm512_or_si512(low, _mm512_slli_epi64(low, 32));
}

// Minima of two blocks, pairs of 16 bits for each of eight rows.
INLINE_VECTORS __m256i minima_of(uint64_t first, uint64_t second) {
    return _mm256_cvtepu8_epi16(
        _mm_unpacklo_epi8(_mm_cvtsi64_si128((int64_t) first), _mm_cvtsi64_si128((int64_t) second)));
}

// Sums of blocks of 32, as four pairs of 16 bits for each super-block.
VECTORS void describe_q8_k(const uint8_t * input, int64_t n_blocks, int32_t * pairs) {
    for (int64_t b = 0; b < n_blocks; ++b, input += Q8_K_BYTES, pairs += 4) {
        const __m128i low  = _mm_loadu_si128((const __m128i *) (input + 260));
        const __m128i high = _mm_loadu_si128((const __m128i *) (input + 276));
        _mm_storeu_si128((__m128i *) pairs, _mm_hadd_epi16(low, high));
    }
}

template <int N>
VECTORS void q4_k_tile(const uint8_t * a, const uint8_t * b, int64_t n_blocks, const uint8_t * const * inputs,
    const int32_t * pairs, float * const * outputs, bool both) {
    __m512 sums[N], minimum_sums[N];
    for (int j = 0; j < N; ++j) {
        sums[j] = minimum_sums[j] = _mm512_setzero_ps();
    }
    for (int64_t block = 0; block < n_blocks; ++block, a += Q4_K_GROUP, b += Q4_K_GROUP) {
        __m512i sum_a[N], sum_b[N], minima[4];
        for (int j = 0; j < N; ++j) {
            sum_a[j] = sum_b[j] = _mm512_setzero_si512();
        }
        for (int part = 0; part < 4; ++part) { // two blocks of 32 numbers
            __m256i part_minima[2];
#pragma GCC unroll 2
            for (int group = 0; group < 2; ++group) {
                const uint8_t * from = group ? b : a;
                uint64_t        s0, s1, m0, m1;
                scales_of(from + 32 + 24 * part, s0, m0);
                scales_of(from + 32 + 24 * part + 12, s1, m1);
                part_minima[group]    = minima_of(m0, m1);
                const __m512i   first = twice(s0), second = twice(s1), mask = _mm512_set1_epi8(15);
                const uint8_t * numbers = from + 128 + 256 * part;
                __m512i         low[4], high[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    const __m512i bytes = load64(numbers + 64 * i);
                    low[i]              = _mm512_and_si512(bytes, mask);
                    high[i]             = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
                }
                __m512i * total = group ? sum_b : sum_a;
#pragma GCC unroll 8
                for (int j = 0; j < N; ++j) {
                    const uint8_t * input = inputs[j] + block * Q8_K_BYTES + 4 + 64 * part;
                    __m512i         sum0 = _mm512_setzero_si512(), sum1 = sum0;
#pragma GCC unroll 4
                    for (int i = 0; i < 4; ++i) {
                        sum0 = _mm512_dpbusd_epi32(sum0, low[i], eight_times(input + 8 * i));
                        sum1 = _mm512_dpbusd_epi32(sum1, high[i], eight_times(input + 32 + 8 * i));
                    }
                    // A part of a sum is below 2^15: 16 products of at most 15 * 127.
                    total[j] = _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(total[j], sum0, first), sum1, second);
                }
            }
            minima[part] = _mm512_inserti64x4(_mm512_castsi256_si512(part_minima[0]), part_minima[1], 1);
        }
        const __m512 d = to_floats(a, b), dmin = to_floats(a + 16, b + 16);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) {
            __m512i minimum_sum = _mm512_setzero_si512();
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) {
                minimum_sum = _mm512_dpwssd_epi32(
                    minimum_sum, _mm512_set1_epi32(pairs[(j * n_blocks + block) * 4 + part]), minima[part]);
            }
            const __m512 scale = _mm512_set1_ps(read<float>(inputs[j] + block * Q8_K_BYTES));
            sums[j] =
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(add_pairs(sum_a[j], sum_b[j])), _mm512_mul_ps(d, scale), sums[j]);
            minimum_sums[j] =
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(minimum_sum), _mm512_mul_ps(dmin, scale), minimum_sums[j]);
        }
    }
    for (int j = 0; j < N; ++j) {
        store(outputs[j], _mm512_sub_ps(sums[j], minimum_sums[j]), both);
    }
}

VECTORS void q4_k_kernel(const Product & p) {
    constexpr int                            WIDTH            = 6;
    static const decltype(&q4_k_tile<1>)     tiles[WIDTH + 1] = { nullptr, q4_k_tile<1>, q4_k_tile<2>, q4_k_tile<3>,
        q4_k_tile<4>, q4_k_tile<5>, q4_k_tile<6> };
    const int64_t                            n_blocks         = p.n_in / 256;
    static thread_local std::vector<int32_t> pairs;
    pairs.resize(std::max<size_t>(pairs.size(), p.n_inputs * n_blocks * 4));
    for (int j = 0; j < p.n_inputs; ++j) {
        describe_q8_k(p.inputs[j], n_blocks, pairs.data() + j * n_blocks * 4);
    }
    for (int64_t row = 0; row < p.n_rows; row += 2 * GROUP) {
        const bool      both = row + GROUP < p.n_rows;
        const uint8_t * a    = p.rows + (size_t) (row / GROUP * n_blocks) * Q4_K_GROUP;
        const uint8_t * b    = both ? a + n_blocks * Q4_K_GROUP : a;
        for (int j = 0; j < p.n_inputs; j += WIDTH) {
            const int n = std::min(WIDTH, p.n_inputs - j);
            float *   outputs[WIDTH];
            for (int i = 0; i < n; ++i) {
                outputs[i] = p.outputs[j + i] + row;
            }
            tiles[n](a, b, n_blocks, p.inputs + j, pairs.data() + j * n_blocks * 4, outputs, both);
        }
    }
}

//
// Q8_0: plain rows of blocks of 32 bytes
//

// The sum of eight parts, in the order of llama.cpp's kernel.
INLINE_VECTORS float add_eight(__m256 x) {
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    const __m128 two  = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Eight rows, two in a vector, times N inputs. Only the first n_rows have outputs.
template <int N>
VECTORS void q8_0_tile(const uint8_t * const * rows, int64_t n_blocks, const uint8_t * const * inputs,
    float * const * outputs, int n_rows) {
    constexpr int PAIRS = 4;
    const __m512i sign  = _mm512_set1_epi8((char) 0x80);
    __m512        sums[PAIRS][N];
    for (int pair = 0; pair < PAIRS; ++pair) {
        for (int j = 0; j < N; ++j) {
            sums[pair][j] = _mm512_setzero_ps();
        }
    }
    for (int64_t block = 0; block < n_blocks; ++block) {
        const size_t at = block * Q8_0_BYTES;
        __m512i      numbers[PAIRS];
        __m512       scales[PAIRS];
#pragma GCC unroll 4
        for (int pair = 0; pair < PAIRS; ++pair) {
            const uint8_t *first = rows[2 * pair] + at, *second = rows[2 * pair + 1] + at;
            numbers[pair] = _mm512_xor_si512(sign,
                _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *) (first + 2))),
                    _mm256_loadu_si256((const __m256i *) (second + 2)), 1));
            const __m128i halves =
                _mm_unpacklo_epi64(_mm_set1_epi16(read<int16_t>(first)), _mm_set1_epi16(read<int16_t>(second)));
            scales[pair] = _mm512_cvtph_ps(_mm256_permute4x64_epi64(_mm256_castsi128_si256(halves), 0x50));
        }
#pragma GCC unroll 6
        for (int j = 0; j < N; ++j) {
            const uint8_t * input = inputs[j] + at;
            const __m512i   y     = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *) (input + 2)));
            const __m512i   offset =
                _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_dpbusd_epi32(_mm512_setzero_si512(), sign, y));
            const __m512 scale = _mm512_set1_ps(to_float(input));
#pragma GCC unroll 4
            for (int pair = 0; pair < PAIRS; ++pair) {
                sums[pair][j] = _mm512_fmadd_ps(_mm512_mul_ps(scales[pair], scale),
                    _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(offset, numbers[pair], y)), sums[pair][j]);
            }
        }
    }
    for (int pair = 0; pair < PAIRS; ++pair) {
        for (int j = 0; j < N; ++j) {
            if (2 * pair < n_rows) {
                outputs[j][2 * pair] = add_eight(_mm512_castps512_ps256(sums[pair][j]));
            }
            if (2 * pair + 1 < n_rows) {
                outputs[j][2 * pair + 1] = add_eight(_mm512_extractf32x8_ps(sums[pair][j], 1));
            }
        }
    }
}

VECTORS void q8_0_kernel(const Product & p) {
    constexpr int64_t                    ROWS             = 8;
    constexpr int                        WIDTH            = 5;
    static const decltype(&q8_0_tile<1>) tiles[WIDTH + 1] = { nullptr, q8_0_tile<1>, q8_0_tile<2>, q8_0_tile<3>,
        q8_0_tile<4>, q8_0_tile<5> };
    const int64_t                        n_blocks         = p.n_in / 32;
    for (int64_t row = 0; row < p.n_rows; row += ROWS) {
        const int       n_rows = (int) std::min(ROWS, p.n_rows - row);
        const uint8_t * rows[ROWS];
        for (int i = 0; i < ROWS; ++i) {
            rows[i] = p.rows + (size_t) (row + std::min(i, n_rows - 1)) * n_blocks * Q8_0_BYTES;
        }
        for (int j = 0; j < p.n_inputs; j += WIDTH) {
            const int n = std::min(WIDTH, p.n_inputs - j);
            float *   outputs[WIDTH];
            for (int i = 0; i < n; ++i) {
                outputs[i] = p.outputs[j + i] + row;
            }
            tiles[n](rows, n_blocks, p.inputs + j, outputs, n_rows);
        }
    }
}

} // namespace

Kernel avx512_integer_kernel(ggml_type type, bool repacked) {
    if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
        return nullptr;
    }
    switch (type) {
    case GGML_TYPE_Q4_0: return repacked ? nibble_kernel<Q4_0> : nullptr;
    case GGML_TYPE_IQ4_NL: return repacked ? nibble_kernel<Iq4Nl> : nullptr;
    case GGML_TYPE_MXFP4: return repacked ? nibble_kernel<Mxfp4> : nullptr;
    case GGML_TYPE_Q4_K: return repacked ? q4_k_kernel : nullptr;
    case GGML_TYPE_Q8_0: return repacked ? nullptr : q8_0_kernel;
    default: return nullptr;
    }
}

} // namespace pyorch

#else

namespace pyorch {

Kernel avx512_integer_kernel(ggml_type, bool) { return nullptr; }

} // namespace pyorch

#endif
