// Matrices of predictors: small, because they are read for every token in addition to the model's weights, and
// multiplied by ggml's kernels.
//
// A weight has 8 bits (Q8_0: blocks of 32 with one scale), or 16 bits if rows are no whole blocks (BF16, which like
// Q8_0 holds any value of an activation).

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyorch {

// One input of matrices with so many columns, in the form of their kernels.
class CompactVector {
public:
    CompactVector(const float * values, int n);

private:
    friend class CompactMatrix;

    int                  n;
    std::vector<uint8_t> bytes;
};

// Returns the dot product of n floats. It sums in several lanes, so that compilers vectorize it.
float dot(const float * a, const float * b, size_t n);

// Asks the processor for memory that is needed soon.
void prefetch(const void * from, size_t n_bytes);

class CompactMatrix {
public:
    CompactMatrix() = default;

    // Copies values[n_rows][n_columns].
    CompactMatrix(const float * values, size_t n_rows, int n_columns);

    size_t n_rows() const { return rows; }
    int    n_columns() const { return columns; }
    size_t n_bytes() const { return bytes.size(); }

    // Asks for rows that are needed soon: decoding has flushed the caches.
    void prefetch(size_t begin, size_t n) const;

    // to[inputs.size()][n] += rows [begin, begin + n) times each input. Reads a row once for all inputs.
    // REQUIRES: each input has as many values as there are columns
    void multiply(const std::vector<CompactVector> & inputs, size_t begin, size_t n, float * to) const;

    // to[i][n_columns] += the sum over r from 0 to n - 1 of factors[i * n + r] * row begin + r, for each i, in that
    // order. Decodes a row once for all i. The result of one i does not depend on the others.
    void add_rows(size_t begin, size_t n, const float * factors, const std::vector<float *> & to) const;

private:
    size_t               rows      = 0;
    int                  columns   = 0;
    size_t               row_bytes = 0;
    std::vector<uint8_t> bytes;

    const uint8_t * row_at(size_t row) const;
};

} // namespace pyorch
