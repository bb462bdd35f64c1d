// Products with matrices that predictors keep in 8 or 16 bits a weight are near those with the floats that they copy.

#include "random_weights.h"

#include "prediction/compact_matrix.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>

using namespace pyorch;

static void require(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

// Of so many columns, some of which are whole blocks. scale: more than 16-bit floats of IEEE hold.
static void check(int n_columns, float scale) {
    constexpr size_t N_ROWS = 12, N_INPUTS = 3, BEGIN = 4, N = 5;
    const std::vector<float> weights = random_weights(N_ROWS * n_columns, scale);
    const CompactMatrix      matrix(weights.data(), N_ROWS, n_columns);
    require(matrix.n_rows() == N_ROWS && matrix.n_columns() == n_columns, "a matrix knows its shape");
    require(matrix.n_bytes() <= 2 * weights.size(), "a weight takes two bytes at most");
    require(n_columns % 32 != 0 || matrix.n_bytes() <= weights.size() * 17 / 16, "or hardly more than one");

    std::vector<std::vector<float>> inputs;
    std::vector<CompactVector>      compact;
    for (size_t i = 0; i < N_INPUTS; ++i) {
        inputs.push_back(random_weights(n_columns, 1));
        compact.emplace_back(inputs.back().data(), n_columns);
    }
    std::vector<float> products(N_INPUTS * N, scale);
    matrix.multiply(compact, BEGIN, N, products.data());
    const double typical = scale * std::sqrt((double) n_columns);
    for (size_t i = 0; i < N_INPUTS; ++i) {
        for (size_t r = 0; r < N; ++r) {
            double exact = scale;
            for (int c = 0; c < n_columns; ++c) {
                exact += (double) weights[(BEGIN + r) * n_columns + c] * inputs[i][c];
            }
            const double error = std::abs(products[i * N + r] - exact);
            require(error < 0.06 * typical, "a product is added, and near the exact one");
        }
    }
    std::vector<float> single(N, scale);
    matrix.multiply({ compact[1] }, BEGIN, N, single.data());
    require(std::equal(single.begin(), single.end(), products.begin() + N), "no input changes what comes of another");

    std::vector<float> sum(n_columns, 1);
    matrix.add_row(7, 0.5f, sum.data());
    for (int c = 0; c < n_columns; ++c) {
        require(std::abs(sum[c] - 1 - 0.5 * weights[7 * n_columns + c]) < 0.02 * scale, "a row is added");
    }
}

int main() {
    for (float scale : { 0.02f, 1e6f }) {
        check(256, scale);
        check(40, scale);
    }
    return 0;
}
