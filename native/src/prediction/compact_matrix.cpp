#include "prediction/compact_matrix.h"

#include "base/cpu_backend.h"

#include "ggml.h"

#include <algorithm>

namespace pyorch {

static constexpr size_t CACHE_LINE = 64;
static constexpr size_t AHEAD      = 16 << 10; // bytes that are fetched while others are multiplied

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

// Into the second level: processors have more such fetches under way at once than of those into the first.
void prefetch(const void * from, size_t n_bytes) {
    for (size_t at = 0; at < n_bytes; at += CACHE_LINE) {
        __builtin_prefetch((const char *) from + at, 0, 2);
    }
}

const uint8_t * CompactMatrix::row_at(size_t row) const {
    return bytes.data() + row * row_bytes;
}

void CompactMatrix::prefetch(size_t begin, size_t n) const {
    pyorch::prefetch(row_at(begin), n * row_bytes);
}

void CompactMatrix::multiply(const std::vector<CompactVector> & inputs, size_t begin, size_t n, float * to) const {
    const auto   dot   = cpu_backend().type_traits(type_of(columns))->vec_dot;
    const size_t ahead = std::min(n, AHEAD / row_bytes + 1);
    prefetch(begin, ahead);
    for (size_t r = 0; r < n; ++r) {
        // Hardware looks no farther ahead than a page.
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

void CompactMatrix::add_row(size_t row, float factor, float * to) const {
    thread_local std::vector<float> values;
    values.resize(columns);
    ggml_get_type_traits(type_of(columns))->to_float(row_at(row), values.data(), columns);
    for (int i = 0; i < columns; ++i) {
        to[i] += factor * values[i];
    }
}

} // namespace pyorch
