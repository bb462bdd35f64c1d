#include "prediction/compact_matrix.h"

#include "base/cpu_backend.h"

#include "ggml.h"

#include <algorithm>

namespace pyorch {

static constexpr size_t CACHE_LINE = 64;
static constexpr size_t AHEAD      = 16 << 10; // bytes fetched during the multiplication of earlier ones

static constexpr int N_OF_BLOCK = 32;

struct Q8Block { // GGML_TYPE_Q8_0 in a file
    ggml_fp16_t scale;
    int8_t      values[N_OF_BLOCK];
};

static constexpr int COLUMNS_AT_ONCE = 512; // of a row that is added to many: all their columns stay in the L1 cache

static ggml_type type_of(int n_columns) {
    return n_columns % ggml_blck_size(GGML_TYPE_Q8_0) == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_BF16;
}

CompactVector::CompactVector(const float * values, int n) : n(n) {
    const ggml_type type = cpu_backend().type_traits(type_of(n))->vec_dot_type;
    bytes.resize(ggml_row_size(type, n));
    cpu_backend().type_traits(type)->from_float(values, bytes.data(), n);
}

CompactMatrix::CompactMatrix(const float * values, size_t n_rows, int n_columns) :
        rows(n_rows), columns(n_columns), row_bytes(ggml_row_size(type_of(n_columns), n_columns)),
        bytes(n_rows * row_bytes) {
    const auto from_float = cpu_backend().type_traits(type_of(n_columns))->from_float;
    for (size_t r = 0; r < rows; ++r) {
        from_float(values + r * columns, (void *) row_at(r), columns);
    }
}

float dot(const float * a, const float * b, size_t n) {
    constexpr size_t LANES       = 16;
    float            sums[LANES] = {};
    size_t           i           = 0;
    for (; i + LANES <= n; i += LANES) {
        for (size_t j = 0; j < LANES; ++j) {
            sums[j] += a[i + j] * b[i + j];
        }
    }
    float sum = 0;
    for (; i < n; ++i) {
        sum += a[i] * b[i];
    }
    for (float s : sums) {
        sum += s;
    }
    return sum;
}

// Into the L2 cache: processors allow more such fetches in flight than into the L1 cache.
void prefetch(const void * from, size_t n_bytes) {
    for (size_t at = 0; at < n_bytes; at += CACHE_LINE) {
        __builtin_prefetch((const char *) from + at, 0, 2);
    }
}

const uint8_t * CompactMatrix::row_at(size_t row) const { return bytes.data() + row * row_bytes; }

void CompactMatrix::prefetch(size_t begin, size_t n) const { pyorch::prefetch(row_at(begin), n * row_bytes); }

void CompactMatrix::multiply(const std::vector<CompactVector> & inputs, size_t begin, size_t n, float * to) const {
    const auto   dot   = cpu_backend().type_traits(type_of(columns))->vec_dot;
    const size_t ahead = std::min(n, AHEAD / row_bytes + 1);
    prefetch(begin, ahead);
    for (size_t r = 0; r < n; ++r) {
        // The hardware prefetcher stops at the end of a page.
        if (r + ahead < n) {
            prefetch(begin + r + ahead, 1);
        }
        const uint8_t * row = row_at(begin + r);
        for (size_t i = 0; i < inputs.size(); ++i) {
            float product;
            dot(columns, &product, 0, row, 0, inputs[i].bytes.data(), 0, 1);
            to[i * n + r] += product;
        }
    }
}

// Decodes n whole blocks to values[n]; and to[n] += factor * from[n], where add_rows spends its time. One body for all
// processors, without fused multiply-add, so that the bits are the same on all.
static inline __attribute__((always_inline)) void decode_any(const Q8Block * blocks, int n, float * values) {
    for (int b = 0; b < n / N_OF_BLOCK; ++b) {
        const float scale = ggml_fp16_to_fp32(blocks[b].scale);
        for (int i = 0; i < N_OF_BLOCK; ++i) {
            values[b * N_OF_BLOCK + i] = scale * blocks[b].values[i];
        }
    }
}

static inline __attribute__((always_inline)) void add_any(const float * from, float factor, int n, float * to) {
    for (int i = 0; i < n; ++i) {
        to[i] += factor * from[i];
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2"))) static void decode_avx2(const Q8Block * blocks, int n, float * values) {
    decode_any(blocks, n, values);
}

__attribute__((target("avx2"))) static void add_avx2(const float * from, float factor, int n, float * to) {
    add_any(from, factor, n, to);
}
#endif

struct RowKernels {
    void (*decode)(const Q8Block * blocks, int n, float * values);
    void (*add)(const float * from, float factor, int n, float * to);
};

static const RowKernels & row_kernels() {
    static constexpr RowKernels plain = {
        [](const Q8Block * blocks, int n, float * values) { decode_any(blocks, n, values); },
        [](const float * from, float factor, int n, float * to) { add_any(from, factor, n, to); },
    };
#if defined(__x86_64__) && defined(__GNUC__)
    static constexpr RowKernels avx2 = { decode_avx2, add_avx2 };
    static const bool           has  = __builtin_cpu_supports("avx2");
    return has ? avx2 : plain;
#else
    return plain;
#endif
}

void CompactMatrix::add_rows(size_t begin, size_t n, const float * factors, const std::vector<float *> & to) const {
    const ggml_type type  = type_of(columns);
    const int       block = (int) ggml_blck_size(type);
    const size_t    bytes = ggml_type_size(type);
    float           values[COLUMNS_AT_ONCE];
    prefetch(begin, std::min(n, AHEAD / row_bytes + 1));
    for (int column = 0; column < columns; column += COLUMNS_AT_ONCE) {
        const int n_columns = std::min(COLUMNS_AT_ONCE, columns - column);
        for (size_t r = 0; r < n; ++r) {
            const uint8_t * from = row_at(begin + r) + column / block * bytes;
            if (type == GGML_TYPE_Q8_0) {
                row_kernels().decode((const Q8Block *) from, n_columns, values);
            } else {
                ggml_get_type_traits(type)->to_float(from, values, n_columns);
            }
            for (size_t i = 0; i < to.size(); ++i) {
                row_kernels().add(values, factors[i * n + r], n_columns, to[i] + column);
            }
        }
    }
}

} // namespace pyorch
