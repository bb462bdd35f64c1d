#include "kernels/candidates.h"

#if defined(__x86_64__)

#include <algorithm>
#include <immintrin.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized" // GCC 12 warns of vectors that its own header leaves undefined
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define VECTORS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma")))
#define INLINE_VECTORS VECTORS inline __attribute__((always_inline))

namespace pyorch {
namespace {

// How llama.cpp multiplies two rows: in steps, each with PARTS sums of a vector, which are added at the end.
struct Bf16 {
    static constexpr int64_t STEP  = 64;
    static constexpr int     PARTS = 2, BYTES = 2 * 32, ROWS = 4, WIDTH = 3;
    using Numbers = __m512bh;

    INLINE_VECTORS static Numbers load(const uint8_t * from) { return (Numbers) _mm512_loadu_si512(from); }
    INLINE_VECTORS static __m512  add(__m512 sum, Numbers a, Numbers b) { return _mm512_dpbf16_ps(sum, a, b); }
    INLINE_VECTORS static float   total(const __m512 * sums) {
        // Zero first, as llama.cpp has it: two sums of -0 make +0.
        return (float) (0.0 + (double) _mm512_reduce_add_ps(sums[0]) + (double) _mm512_reduce_add_ps(sums[1]));
    }
};

struct F16 {
    static constexpr int64_t STEP  = 64;
    static constexpr int     PARTS = 4, BYTES = 2 * 16, ROWS = 2, WIDTH = 3;
    using Numbers = __m512;

    INLINE_VECTORS static Numbers load(const uint8_t * from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) from));
    }
    INLINE_VECTORS static __m512 add(__m512 sum, Numbers a, Numbers b) { return _mm512_fmadd_ps(a, b, sum); }
    INLINE_VECTORS static float  total(const __m512 * sums) {
        return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[2]), _mm512_add_ps(sums[1], sums[3])));
    }
};

// ROWS rows times N inputs. Only the first n_rows have outputs.
template <class Format, int N>
VECTORS void tile(
    const uint8_t * const * rows, int64_t n_in, const uint8_t * const * inputs, float * const * outputs, int n_rows) {
    __m512 sums[Format::ROWS][N][Format::PARTS];
    for (int r = 0; r < Format::ROWS; ++r) {
        for (int j = 0; j < N; ++j) {
            for (int part = 0; part < Format::PARTS; ++part) {
                sums[r][j][part] = _mm512_setzero_ps();
            }
        }
    }
    for (size_t at = 0; at < (size_t) n_in * 2; at += Format::STEP * 2) {
#pragma GCC unroll 4
        for (int part = 0; part < Format::PARTS; ++part) {
            const size_t             from = at + part * Format::BYTES;
            typename Format::Numbers weights[Format::ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < Format::ROWS; ++r) {
                weights[r] = Format::load(rows[r] + from);
            }
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) {
                const auto input = Format::load(inputs[j] + from);
#pragma GCC unroll 4
                for (int r = 0; r < Format::ROWS; ++r) {
                    sums[r][j][part] = Format::add(sums[r][j][part], weights[r], input);
                }
            }
        }
    }
    for (int r = 0; r < n_rows; ++r) {
        for (int j = 0; j < N; ++j) {
            outputs[j][r] = Format::total(sums[r][j]);
        }
    }
}

template <class Format>
VECTORS void kernel(const Product & p) {
    static const decltype(&tile<Format, 1>) tiles[] = { nullptr, tile<Format, 1>, tile<Format, 2>, tile<Format, 3> };
    for (int64_t row = 0; row < p.n_rows; row += Format::ROWS) {
        const int       n_rows = (int) std::min<int64_t>(Format::ROWS, p.n_rows - row);
        const uint8_t * rows[Format::ROWS];
        for (int i = 0; i < Format::ROWS; ++i) {
            rows[i] = p.rows + (size_t) (row + std::min(i, n_rows - 1)) * p.n_in * 2;
        }
        for (int j = 0; j < p.n_inputs; j += Format::WIDTH) {
            const int n = std::min(Format::WIDTH, p.n_inputs - j);
            float *   outputs[Format::WIDTH];
            for (int i = 0; i < n; ++i) {
                outputs[i] = p.outputs[j + i] + row;
            }
            tiles[n](rows, p.n_in, p.inputs + j, outputs, n_rows);
        }
    }
}

} // namespace

Kernel avx512_float_kernel(ggml_type type, bool repacked) {
    if (repacked || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq")) {
        return nullptr;
    }
    return type == GGML_TYPE_BF16 ? kernel<Bf16> : type == GGML_TYPE_F16 ? kernel<F16> : nullptr;
}

} // namespace pyorch

#else

namespace pyorch {

Kernel avx512_float_kernel(ggml_type, bool) { return nullptr; }

} // namespace pyorch

#endif
