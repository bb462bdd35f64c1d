#include "model/layout_rates.h"

#include "base/cpu_backend.h"
#include "base/cpu_time.h"
#include "base/status.h"
#include "kernels/kernels.h"
#include "model/layout.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace pyorch {
namespace {

constexpr size_t  MATRIX_BYTES = 24 << 20; // of all matrices: they leave a core's caches before their next use
constexpr int64_t MOST_EXPERTS = 4096;
constexpr int     N_ROUNDS     = 3;
constexpr int64_t ROWS         = 8; // different ones: quantizing is slow

// Returns the shortest time of some rounds, without the first, in nanoseconds for each byte.
template <class Work>
double shortest(size_t n_bytes, const Work & work) {
    double best = INFINITY;
    for (int round = 0; round <= N_ROUNDS; ++round) {
        const uint64_t begin = thread_cpu_ns();
        work();
        best = round > 0 ? std::min(best, (double) (thread_cpu_ns() - begin)) : best;
    }
    return best / (double) n_bytes;
}

// Matrices of several experts in one order, and their multiplication.
class Matrices {
public:
    Matrices(const ExpertTensor & tensor, bool repacked) :
            type_(type_of(tensor)), n_in_(tensor.n_in), n_out_(tensor.n_out),
            n_experts_(std::clamp<int64_t>((int64_t) (MATRIX_BYTES / tensor.stride), 1, MOST_EXPERTS)),
            kernel_(find_kernel(type_, n_in_, n_out_, repacked)),
            backend_(ggml_backend_dev_init(cpu_backend().device, nullptr)) {
        ggml_backend_buffer_type_t of = cpu_buffers(repacked);
        if (!backend_ || !of) {
            throw Failure(PYORCH_MEMORY, "llama.cpp gives no buffer to measure how fast experts are multiplied");
        }
        cpu_backend().set_n_threads(backend_.get(), 1);
        const ggml_init_params params = { ggml_tensor_overhead(), nullptr, true };
        weights_.reset(ggml_init(params));
        experts_ = ggml_new_tensor_3d(weights_.get(), type_, n_in_, n_out_, n_experts_);
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(weights_.get(), of));
        if (!buffer_) {
            throw Failure(PYORCH_MEMORY, "there is no memory to measure how fast experts are multiplied");
        }
        std::vector<float> numbers((size_t) (n_in_ * ROWS));
        for (size_t i = 0; i < numbers.size(); ++i) {
            numbers[i] = std::sin(0.37f * (float) i);
        }
        const size_t      row_bytes = ggml_row_size(type_, n_in_);
        std::vector<char> rows(row_bytes * ROWS), all(tensor.stride * (size_t) n_experts_);
        ggml_quantize_chunk(type_, numbers.data(), rows.data(), 0, ROWS, n_in_, nullptr);
        for (size_t at = 0; at < all.size(); at += row_bytes) {
            memcpy(all.data() + at, rows.data() + at / row_bytes % ROWS * row_bytes, row_bytes);
        }
        ggml_backend_tensor_set(experts_, all.data(), 0, all.size());
    }

    size_t  bytes() const { return ggml_nbytes(experts_); }
    char *  matrix(int64_t expert) const { return (char *) experts_->data + expert * experts_->nb[2]; }
    int64_t n_experts() const { return n_experts_; }

    // Returns a core's nanoseconds for each byte, with n_inputs inputs for each expert.
    double multiplied(int n_inputs) {
        const ggml_init_params        params = { 4 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        const GgmlOwned<ggml_context> others(ggml_init(params));
        const int64_t                 n      = n_inputs * n_experts_;
        ggml_tensor *                 input  = ggml_new_tensor_3d(others.get(), GGML_TYPE_F32, n_in_, 1, n);
        ggml_tensor *                 ids    = ggml_new_tensor_2d(others.get(), GGML_TYPE_I32, 1, n);
        ggml_tensor *                 output = ggml_mul_mat_id(others.get(), experts_, input, ids);
        ggml_cgraph *                 graph  = ggml_new_graph(others.get());
        ggml_build_forward_expand(graph, output);
        const GgmlOwned<ggml_backend_buffer> bytes(ggml_backend_alloc_ctx_tensors(others.get(), backend_.get()));
        if (!bytes) {
            throw Failure(PYORCH_MEMORY, "there is no memory to measure how fast experts are multiplied");
        }
        for (int64_t i = 0; i < n_in_ * n; ++i) {
            ((float *) input->data)[i] = std::cos(0.11f * (float) (i % 9973));
        }
        for (int64_t i = 0; i < n; ++i) {
            ((int32_t *) ids->data)[i] = (int32_t) (i % n_experts_);
        }
        if (!kernel_) {
            return shortest(this->bytes(), [&] { ggml_backend_graph_compute(backend_.get(), graph); });
        }
        const ggml_type      as        = cpu_backend().type_traits(type_)->vec_dot_type;
        const size_t         row_bytes = ggml_row_size(as, n_in_);
        std::vector<uint8_t> quantized(row_bytes * (size_t) n);
        return shortest(this->bytes(), [&] {
            for (int64_t i = 0; i < n; ++i) {
                cpu_backend().type_traits(as)->from_float(
                    (const float *) input->data + i * n_in_, quantized.data() + (size_t) i * row_bytes, n_in_);
            }
            for (int64_t expert = 0; expert < n_experts_; ++expert) {
                const uint8_t * from[LayoutRates::N_INPUTS];
                float *         to[LayoutRates::N_INPUTS];
                for (int i = 0; i < n_inputs; ++i) {
                    const int64_t at = expert + i * n_experts_;
                    from[i]          = quantized.data() + (size_t) at * row_bytes;
                    to[i]            = (float *) output->data + at * n_out_;
                }
                kernel_({ n_in_, (const uint8_t *) matrix(expert), n_out_, from, to, n_inputs });
            }
        });
    }

private:
    ggml_type                      type_;
    int64_t                        n_in_, n_out_, n_experts_;
    Kernel                         kernel_;
    GgmlOwned<ggml_backend>        backend_;
    GgmlOwned<ggml_context>        weights_;
    ggml_tensor *                  experts_ = nullptr;
    GgmlOwned<ggml_backend_buffer> buffer_;
};

} // namespace

LayoutRates measure_layouts(const ExpertTensor & tensor) {
    Matrices    plain(tensor, false), repacked(tensor, true);
    LayoutRates rates;
    for (const int i : { 0, 1 }) {
        const int n_inputs = i == 0 ? 1 : LayoutRates::N_INPUTS;
        rates.plain[i]     = plain.multiplied(n_inputs);
        rates.repacked[i]  = repacked.multiplied(n_inputs);
    }
    rates.repacking = shortest(plain.bytes(), [&] {
        for (int64_t expert = 0; expert < plain.n_experts(); ++expert) {
            repack(tensor, plain.matrix(expert), repacked.matrix(expert));
        }
    });
    return rates;
}

} // namespace pyorch
