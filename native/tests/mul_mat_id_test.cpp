// mul_mat_id computes as before with more experts than the mask of deferred ones holds, and with none to defer.

#include "ggml-cpu.h"
#include "ggml.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main() {
    constexpr int n_expert = 1500, n_used = 3, n_tokens = 5, n_in = 32, n_out = 8;
    ggml_context * ctx = ggml_init({ (size_t) 64 << 20, nullptr, false });
    ggml_tensor *  experts = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in, n_out, n_expert);
    ggml_tensor *  inputs  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in, n_used, n_tokens);
    ggml_tensor *  ids     = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, n_tokens);
    auto * weights = (float *) experts->data;
    auto * values  = (float *) inputs->data;
    auto * chosen  = (int32_t *) ids->data;
    for (int i = 0; i < n_in * n_out * n_expert; ++i) {
        weights[i] = std::sin(0.37f * (float) i);
    }
    for (int i = 0; i < n_in * n_used * n_tokens; ++i) {
        values[i] = std::cos(0.11f * (float) i);
    }
    for (int i = 0; i < n_used * n_tokens; ++i) {
        chosen[i] = i * 367 % n_expert; // on both sides of 1024
    }
    ggml_tensor * out   = ggml_mul_mat_id(ctx, experts, inputs, ids);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    if (ggml_graph_compute_with_ctx(ctx, graph, 2) != GGML_STATUS_SUCCESS) {
        fprintf(stderr, "the graph failed\n");
        return 1;
    }
    for (int slot = 0; slot < n_used * n_tokens; ++slot) {
        for (int row = 0; row < n_out; ++row) {
            double sum = 0;
            for (int i = 0; i < n_in; ++i) {
                sum += (double) weights[((size_t) chosen[slot] * n_out + row) * n_in + i] * values[slot * n_in + i];
            }
            const float got = ((const float *) out->data)[slot * n_out + row];
            if (!(std::abs(got - sum) < 1e-4)) {
                fprintf(stderr, "slot %d, expert %d, row %d: %g is not %g\n", slot, chosen[slot], row, got, sum);
                return 1;
            }
        }
    }
    ggml_free(ctx);
    return 0;
}
