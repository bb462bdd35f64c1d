// How fast one core multiplies experts, by llama.cpp's mul_mat_id and by the kernels of src/kernels: for types that have
// one here, and numbers of inputs that an expert may have.
//
// Behind them, what decides whether experts are repacked (model/layout_rates.h): a decoded token repacks an expert that
// it misses, and multiplies it once. Repacking pays if fewer than the printed share of an expert's uses are misses.
//
// A matrix is [2048, 1024]. There are 64 of them, so each is cold when its turn comes again. Both sides quantize the
// inputs. Each figure is the median of rounds that take turns.

#include "base/cpu_backend.h"
#include "base/cpu_time.h"
#include "kernels/kernels.h"
#include "model/layout.h"
#include "model/layout_rates.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

using namespace pyorch;

namespace {

constexpr int64_t N_IN = 2048, N_OUT = 1024, N_EXPERTS = 64;
constexpr int     N_ROUNDS = 7;

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// n_refused: 0 for the fastest kernel, 1 for the one after it.
void bench(ggml_type type, bool repacked, int n_refused) {
    const Kernel kernel = find_kernel(type, N_IN, N_OUT, repacked, n_refused);
    if (!kernel) {
        return;
    }
    ggml_backend_t backend = ggml_backend_dev_init(cpu_backend().device, nullptr);
    cpu_backend().set_n_threads(backend, 1);

    const ggml_init_params params  = { 8 * ggml_tensor_overhead(), nullptr, true };
    ggml_context *         ctx     = ggml_init(params);
    ggml_tensor *          experts = ggml_new_tensor_3d(ctx, type, N_IN, N_OUT, N_EXPERTS);
    ggml_backend_buffer_t  buffer  = ggml_backend_alloc_ctx_tensors_from_buft(ctx, cpu_buffers(repacked));

    const size_t       matrix_bytes = ggml_row_size(type, N_IN) * N_OUT;
    std::vector<float> weights(N_IN * N_OUT);
    for (size_t i = 0; i < weights.size(); ++i) {
        weights[i] = std::sin(0.37f * (float) i) + 0.2f * std::cos(1.7f * (float) i);
    }
    std::vector<uint8_t> one(matrix_bytes), file;
    ggml_quantize_chunk(type, weights.data(), one.data(), 0, N_OUT, N_IN, nullptr);
    for (int e = 0; e < N_EXPERTS; ++e) {
        file.insert(file.end(), one.begin(), one.end());
    }
    ggml_backend_tensor_set(experts, file.data(), 0, file.size());
    if (repacked) {
        ggml_tensor shape = *experts;
        shape.buffer      = nullptr;
        shape.ne[2]       = 1;
        for (int e = 0; e < N_EXPERTS; ++e) {
            cpu_backend().repack(&shape, N_OUT, file.data() + e * matrix_bytes, one.data());
        }
    }
    const ggml_type as       = cpu_backend().type_traits(type)->vec_dot_type;
    const auto      quantize = cpu_backend().type_traits(as)->from_float;
    const size_t    in_bytes = ggml_row_size(as, N_IN);

    for (const int n : { 1, 2, 4, 8, 16, 64 }) {
        const int64_t          n_tokens = n * N_EXPERTS;
        const ggml_init_params more     = { 8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ggml_context *         compute  = ggml_init(more);
        ggml_tensor *          input    = ggml_new_tensor_3d(compute, GGML_TYPE_F32, N_IN, 1, n_tokens);
        ggml_tensor *          ids      = ggml_new_tensor_2d(compute, GGML_TYPE_I32, 1, n_tokens);
        ggml_tensor *          output   = ggml_mul_mat_id(compute, experts, input, ids);
        ggml_cgraph *          graph    = ggml_new_graph(compute);
        ggml_build_forward_expand(graph, output);
        ggml_backend_buffer_t others = ggml_backend_alloc_ctx_tensors(compute, backend);
        auto *                inputs = (float *) input->data;
        for (int64_t i = 0; i < N_IN * n_tokens; ++i) {
            inputs[i] = std::cos(0.11f * (float) (i % 9973));
        }
        for (int64_t t = 0; t < n_tokens; ++t) {
            ((int32_t *) ids->data)[t] = (int32_t) (t % N_EXPERTS);
        }
        std::vector<uint8_t> quantized(in_bytes * n_tokens);
        std::vector<float>   ours(N_OUT * n_tokens);
        std::vector<double>  seconds[2];
        for (int round = 0; round <= N_ROUNDS; ++round) {
            const uint64_t begin = thread_cpu_ns();
            ggml_backend_graph_compute(backend, graph);
            const uint64_t middle = thread_cpu_ns();
            for (int64_t t = 0; t < n_tokens; ++t) {
                quantize(inputs + t * N_IN, quantized.data() + t * in_bytes, N_IN);
            }
            for (int64_t e = 0; e < N_EXPERTS; ++e) {
                const uint8_t * from[64];
                float *         to[64];
                for (int i = 0; i < n; ++i) {
                    from[i] = quantized.data() + (e + i * N_EXPERTS) * in_bytes;
                    to[i]   = ours.data() + (e + i * N_EXPERTS) * N_OUT;
                }
                kernel({ N_IN, file.data() + e * matrix_bytes, N_OUT, from, to, n });
            }
            const uint64_t end = thread_cpu_ns();
            if (round > 0) {
                seconds[0].push_back(1e-9 * (double) (middle - begin));
                seconds[1].push_back(1e-9 * (double) (end - middle));
            }
        }
        const bool   equal  = memcmp(ours.data(), output->data, ours.size() * sizeof(float)) == 0;
        const double theirs = median(seconds[0]), mine = median(seconds[1]);
        const double billions = 1e-9 * (double) (N_IN * N_OUT * n_tokens), gib = (double) file.size() / (1 << 30);
        printf("%-7s %-8s %3d   %6.1f %6.1f   %5.2f   %6.1f %6.1f%s\n", ggml_type_name(type),
            n_refused    ? "second" :
                repacked ? "repacked" :
                           "plain",
            n, billions / theirs, billions / mine, theirs / mine, gib / theirs, gib / mine,
            equal ? "" : "   OTHER BITS");
        ggml_backend_buffer_free(others);
        ggml_free(compute);
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    ggml_backend_free(backend);
}

void bench_layouts(ggml_type type) {
    const size_t       bytes  = ggml_row_size(type, N_IN) * N_OUT;
    const ExpertTensor tensor = { "", "", ggml_type_name(type), 0, 0, bytes, N_IN, N_OUT };
    if (!can_repack(tensor)) {
        return;
    }
    const LayoutRates rates = measure_layouts(tensor);
    const auto        gib   = [](double ns) { return 1e9 / ns / (1 << 30); };
    printf("%-7s %8.1f   %6.1f %8.1f   %6.1f %8.1f   %7.0f %%\n", ggml_type_name(type), gib(rates.repacking),
        gib(rates.plain[0]), gib(rates.repacked[0]), gib(rates.plain[1]) * LayoutRates::N_INPUTS,
        gib(rates.repacked[1]) * LayoutRates::N_INPUTS, 100 * (rates.plain[0] - rates.repacked[0]) / rates.repacking);
}

} // namespace

int main() {
    printf("                inputs  10^9 products/s  ratio  GiB/s of weights\n");
    printf("type    layout   each   llama    ours            llama    ours\n");
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        for (const bool repacked : { false, true }) {
            bench((ggml_type) type, repacked, 0);
            bench((ggml_type) type, repacked, 1);
        }
    }
    printf("\n        GiB/s of   1 input, GiB/s    8 inputs, GiB/s    pays below\n");
    printf("type    repacking   plain repacked    plain repacked   this share of misses\n");
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        if (ggml_blck_size((ggml_type) type) > 0) {
            bench_layouts((ggml_type) type);
        }
    }
    return 0;
}
