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
    constexpr size_t         N_ROWS = 12, N_INPUTS = 3, BEGIN = 4, N = 5;
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

    const std::vector<float>        factors = random_weights(N_INPUTS * N, 1);
    std::vector<std::vector<float>> sums(N_INPUTS, std::vector<float>(n_columns, 1));
    std::vector<float *>            to;
    for (auto & sum : sums) {
        to.push_back(sum.data());
    }
    matrix.add_rows(BEGIN, N, factors.data(), to);
    for (size_t i = 0; i < N_INPUTS; ++i) {
        for (int c = 0; c < n_columns; ++c) {
            double exact = 1;
            for (size_t r = 0; r < N; ++r) {
                exact += (double) factors[i * N + r] * weights[(BEGIN + r) * n_columns + c];
            }
            require(std::abs(sums[i][c] - exact) < 0.06 * scale * std::sqrt((double) N), "rows are added");
        }
    }
    std::vector<float> alone(n_columns, 1);
    matrix.add_rows(BEGIN, N, &factors[N], { alone.data() });
    require(alone == sums[1], "what comes to one does not depend on the others");
}

int main() {
    for (float scale : { 0.02f, 1e6f }) {
        check(256, scale);
        check(40, scale);
        check(1056, scale); // more than are added at once
    }
    return 0;
}
