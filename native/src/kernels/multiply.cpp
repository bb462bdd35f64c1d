#include "kernels/multiply.h"

#include "base/cpu_backend.h"
#include "codecs/nibble.h"

#include <algorithm>
#include <vector>

namespace pyorch {
namespace {

constexpr int64_t GROUP       = 16;         // rows that are multiplied together at most, in every layout
constexpr size_t  INPUT_BYTES = 128 * 1024; // of inputs: they stay in a core's second cache

struct Line {
    alignas(64) uint8_t bytes[64];
};

// As llama.cpp's kernel does it, a number at a time.
void multiply_by_dots(ggml_type type, const Product & p) {
    const auto   dot       = cpu_backend().type_traits(type)->vec_dot;
    const size_t row_bytes = ggml_row_size(type, p.n_in);
    for (int j = 0; j < p.n_inputs; ++j) {
        for (int64_t row = 0; row < p.n_rows; ++row) {
            dot((int) p.n_in, p.outputs[j] + row, 0, p.rows + row * row_bytes, 0, p.inputs[j], 0, 1);
        }
    }
}

// Rows first to last of the matrix, with n_together inputs at a time.
void multiply_rows(const Multiplication & how, const ExpertInputs & given, int64_t first, int64_t last,
    const std::vector<const uint8_t *> & inputs, const std::vector<float *> & outputs, size_t n_together) {
    const ggml_tensor & experts   = *given.op->src[0];
    const size_t        row_bytes = ggml_row_size(experts.type, experts.ne[0]);

    static thread_local std::vector<Line>    decoded;
    static thread_local std::vector<float *> to;
    to.resize(outputs.size());
    const int64_t step = how.nibbles ? GROUP : last - first; // decoded rows stay in the cache
    for (int64_t row = first; row < last; row += step) {
        const int64_t   n    = std::min(step, last - row);
        const uint8_t * rows = given.matrix + row * row_bytes;
        if (how.nibbles) {
            decoded.resize(std::max<size_t>(decoded.size(), n * row_bytes / sizeof(Line) + 1));
            decode_nibbles(given.matrix, experts.ne[0], experts.ne[1], row, n, decoded[0].bytes);
            rows = decoded[0].bytes;
        }
        for (size_t i = 0; i < to.size(); ++i) {
            to[i] = outputs[i] + row;
        }
        for (size_t i = 0; i < to.size(); i += n_together) {
            const int     n_inputs = (int) std::min(n_together, to.size() - i);
            const Product product  = { experts.ne[0], rows, n, inputs.data() + i, to.data() + i, n_inputs };
            if (how.kernel) {
                how.kernel(product);
            } else {
                multiply_by_dots(experts.type, product);
            }
        }
    }
}

} // namespace

bool multiply(const Multiplication & how, const ExpertInputs & given) {
    if (!how.kernel && !how.nibbles) {
        return false;
    }
    const ggml_tensor & experts     = *given.op->src[0];
    const ggml_tensor & src1        = *given.op->src[1];
    const size_t        input_bytes = ggml_row_size(cpu_backend().type_traits(experts.type)->vec_dot_type, src1.ne[0]);

    static thread_local std::vector<const uint8_t *> inputs;
    static thread_local std::vector<float *>         outputs;
    inputs.resize(given.n);
    outputs.resize(given.n);
    for (int64_t i = 0; i < given.n; ++i) {
        const int64_t slot = given.pairs[2 * i], token = given.pairs[2 * i + 1];
        inputs[i]  = given.quantized + (slot % src1.ne[1] + token * src1.ne[1]) * input_bytes;
        outputs[i] = (float *) ((char *) given.op->data + slot * given.op->nb[1] + token * given.op->nb[2]);
    }

    const size_t  n_together = std::max<size_t>(INPUT_BYTES / input_bytes, 8);
    const int64_t n_rows = experts.ne[1], n_groups = (n_rows + GROUP - 1) / GROUP, n_threads = given.n_threads;
    // With a counter a thread that is slow takes fewer chunks.
    const int64_t n_chunks = given.next_chunk ? std::min(n_groups, 4 * n_threads) : n_threads;
    for (int64_t chunk = given.thread; chunk < n_chunks;) {
        const int64_t first = chunk * n_groups / n_chunks * GROUP;
        const int64_t last  = std::min((chunk + 1) * n_groups / n_chunks * GROUP, n_rows);
        if (first < last) {
            multiply_rows(how, given, first, last, inputs, outputs, n_together);
        }
        if (!given.next_chunk) {
            break;
        }
        chunk = __atomic_fetch_add(given.next_chunk, 1, __ATOMIC_RELAXED);
    }
    return true;
}

} // namespace pyorch
