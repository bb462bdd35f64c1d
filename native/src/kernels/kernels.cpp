#include "kernels/kernels.h"

#include "base/cpu_backend.h"
#include "base/mutex.h"
#include "kernels/candidates.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <cmath>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

namespace pyorch {
namespace {

// A matrix, multiplied by llama.cpp and by a kernel. Rows and inputs fill no whole number of tiles.
struct Trial {
    static constexpr int64_t N_IN = 1024, N_OUT = 40, N_INPUTS = 11;

    ggml_type          type;
    bool               repacked;
    std::vector<char>  matrix = std::vector<char>(ggml_row_size(type, N_IN) * N_OUT);
    std::vector<float> inputs = std::vector<float>(N_IN * N_INPUTS);

    Trial(ggml_type type, bool repacked) : type(type), repacked(repacked) {
        std::vector<float> weights(N_IN * N_OUT);
        for (size_t i = 0; i < weights.size(); ++i) {
            weights[i] = std::sin(0.37f * (float) i) + 0.2f * std::cos(1.7f * (float) i);
        }
        for (size_t i = 0; i < inputs.size(); ++i) {
            inputs[i] = std::cos(0.11f * (float) i) * (float) (1 + i % 7);
        }
        ggml_quantize_chunk(type, weights.data(), matrix.data(), 0, N_OUT, N_IN, nullptr);
    }

    // Empty if llama.cpp cannot compute it.
    std::vector<float> by_llama_cpp() const {
        ggml_backend_buffer_type_t    of_weights = cpu_buffers(repacked);
        const GgmlOwned<ggml_backend> backend(ggml_backend_dev_init(cpu_backend().device, nullptr));
        const size_t                  nodes = 8;
        const ggml_init_params params       = { nodes * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        const GgmlOwned<ggml_context> weights(ggml_init(params)), others(ggml_init(params));
        if (!of_weights || !backend || !weights || !others) {
            return {};
        }
        cpu_backend().set_n_threads(backend.get(), 1);
        ggml_tensor * experts = ggml_new_tensor_3d(weights.get(), type, N_IN, N_OUT, 1);
        ggml_set_name(experts, "trial of a kernel"); // llama.cpp's log names it
        if (repacked && !cpu_backend().repack(experts, N_OUT, nullptr, nullptr)) {
            return {};
        }
        ggml_tensor * input  = ggml_new_tensor_3d(others.get(), GGML_TYPE_F32, N_IN, 1, N_INPUTS);
        ggml_tensor * ids    = ggml_new_tensor_2d(others.get(), GGML_TYPE_I32, 1, N_INPUTS);
        ggml_tensor * output = ggml_mul_mat_id(others.get(), experts, input, ids);
        ggml_cgraph * graph  = ggml_new_graph(others.get());
        ggml_build_forward_expand(graph, output);
        const GgmlOwned<ggml_backend_buffer> weight_bytes(
            ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), of_weights));
        const GgmlOwned<ggml_backend_buffer> other_bytes(ggml_backend_alloc_ctx_tensors(others.get(), backend.get()));
        if (!weight_bytes || !other_bytes) {
            return {};
        }
        ggml_backend_tensor_set(experts, matrix.data(), 0, matrix.size());
        ggml_backend_tensor_set(input, inputs.data(), 0, ggml_nbytes(input));
        ggml_backend_tensor_memset(ids, 0, 0, ggml_nbytes(ids));
        std::vector<float> numbers(N_OUT * N_INPUTS);
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            return {};
        }
        ggml_backend_tensor_get(output, numbers.data(), 0, numbers.size() * sizeof(float));
        return numbers;
    }

    std::vector<float> by(Kernel kernel) const {
        std::vector<char> rows = matrix;
        if (repacked) {
            ggml_tensor experts = {};
            experts.type        = type;
            experts.ne[0]       = N_IN;
            experts.ne[1]       = N_OUT;
            experts.ne[2] = experts.ne[3] = 1;
            if (!cpu_backend().repack(&experts, N_OUT, rows.data(), matrix.data())) {
                return {};
            }
        }
        const ggml_type      as        = cpu_backend().type_traits(type)->vec_dot_type;
        const auto           quantize  = cpu_backend().type_traits(as)->from_float;
        const size_t         row_bytes = ggml_row_size(as, N_IN);
        std::vector<uint8_t> quantized(row_bytes * N_INPUTS);
        std::vector<float>   numbers(N_OUT * N_INPUTS);
        const uint8_t *      from[N_INPUTS];
        float *              to[N_INPUTS];
        for (int64_t i = 0; i < N_INPUTS; ++i) {
            quantize(inputs.data() + i * N_IN, quantized.data() + i * row_bytes, N_IN);
            from[i] = quantized.data() + i * row_bytes;
            to[i]   = numbers.data() + i * N_OUT;
        }
        kernel({ N_IN, (const uint8_t *) rows.data(), N_OUT, from, to, (int) N_INPUTS });
        return numbers;
    }
};

constexpr decltype(&avx512_integer_kernel) CANDIDATES[] = { avx512_integer_kernel, avx512_float_kernel,
    avx2_integer_kernel }; // the fastest first

Kernel tried(ggml_type type, bool repacked, int n_refused) {
    for (const auto candidate : CANDIDATES) {
        const Kernel kernel = candidate(type, repacked);
        if (!kernel || n_refused-- > 0) {
            continue;
        }
        const Trial              trial(type, repacked);
        const std::vector<float> theirs = trial.by_llama_cpp(), ours = trial.by(kernel);
        if (!theirs.empty() && theirs.size() == ours.size() &&
            memcmp(theirs.data(), ours.data(), ours.size() * sizeof(float)) == 0) {
            return kernel;
        }
    }
    return nullptr;
}

} // namespace

Kernel find_kernel(ggml_type type, int64_t n_in, int64_t n_out, bool repacked, int n_refused) {
    constexpr int64_t FLOATS = 64, ROWS = 8;
    if ((ggml_blck_size(type) == 1 && n_in % FLOATS != 0) || (repacked && n_out % ROWS != 0)) {
        return nullptr;
    }
    static Mutex                                              mutex;
    static std::map<std::tuple<ggml_type, bool, int>, Kernel> found;
    MutexLock                                                 lock(mutex);
    const auto                                                key   = std::make_tuple(type, repacked, n_refused);
    const auto                                                known = found.find(key);
    return known != found.end() ? known->second : found[key] = tried(type, repacked, n_refused);
}

} // namespace pyorch
