// mul_mat_id computes the bits of llama.cpp's kernels: with any number of experts, and with experts that lie anywhere,
// come late, are repacked or have the form of nibble.h, and are multiplied by our kernels.

#include "codecs/interleave.h"
#include "codecs/nibble.h"
#include "kernels/multiply.h"
#include "model/layout.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// With more experts than the mask of deferred ones holds, and with none to defer.
static bool computes_any_number_of_experts() {
    constexpr int  n_expert = 1500, n_used = 3, n_tokens = 5, n_in = 32, n_out = 8;
    ggml_context * ctx     = ggml_init({ (size_t) 64 << 20, nullptr, false });
    ggml_tensor *  experts = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in, n_out, n_expert);
    ggml_tensor *  inputs  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in, n_used, n_tokens);
    ggml_tensor *  ids     = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, n_tokens);
    auto *         weights = (float *) experts->data;
    auto *         values  = (float *) inputs->data;
    auto *         chosen  = (int32_t *) ids->data;
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
        return false;
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
                return false;
            }
        }
    }
    ggml_free(ctx);
    return true;
}

// Experts of the second half are not there until they are waited for.
struct Experts {
    std::vector<std::vector<char>> matrices;
    std::atomic<int>               n_late{ 0 };
    pyorch::Multiplication         how;
};

static Experts * current = nullptr;

static const void * address(const ggml_tensor *, int64_t expert, bool wait) {
    if (!wait && expert >= (int64_t) current->matrices.size() / 2) {
        ++current->n_late;
        return nullptr;
    }
    return current->matrices[expert].data();
}

static bool repacked(const ggml_tensor *) { return true; }

static bool multiply(ggml_tensor * op, const void * matrix, const int32_t * pairs, int64_t n, const void * quantized,
    int thread, int n_threads, int * next_chunk) {
    return pyorch::multiply(current->how,
        { op, (const uint8_t *) matrix, pairs, n, (const uint8_t *) quantized, thread, n_threads, next_chunk });
}

// The types for which this processor has kernels of ours must have them: a trial that fails turns them off in silence.
static bool has_its_kernels() {
    bool complete = true;
#if defined(__x86_64__)
    const bool bytes  = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
    const bool pairs  = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const auto expect = [&](bool condition, ggml_type type, bool repacked, int n_refused) {
        const pyorch::ExpertTensor layout = { "", "", ggml_type_name(type), 0, 0, ggml_row_size(type, 512) * 64, 512,
            64 };
        condition                         = condition && (!repacked || pyorch::can_repack(layout));
        if (condition && !pyorch::find_kernel(type, 512, 64, repacked, n_refused)) {
            fprintf(stderr, "%s: no kernel of ours gives llama.cpp's bits\n", ggml_type_name(type));
            complete = false;
        }
    };
    for (const ggml_type type : { GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4, GGML_TYPE_Q4_K }) {
        expect(bytes, type, true, 0);
        expect(pairs, type, true, bytes ? 1 : 0); // the kernel of 256 bits
        const pyorch::Kernel fastest = pyorch::find_kernel(type, 512, 64, true);
        if (bytes && fastest && fastest == pyorch::find_kernel(type, 512, 64, true, 1)) {
            fprintf(stderr, "%s: the kernel of 512 bits gives other bits than llama.cpp\n", ggml_type_name(type));
            complete = false;
        }
    }
    expect(bytes, GGML_TYPE_Q8_0, false, 0);
    expect(ggml_cpu_has_avx512_bf16(), GGML_TYPE_BF16, false, 0);
#endif
    return complete;
}

static ggml_backend_buffer_type_t repack_buffers() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const auto         get = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * type = get ? get(cpu) : nullptr; type && *type; ++type) {
        if (!strcmp(ggml_backend_buft_name(*type), "CPU_REPACK")) {
            return *type;
        }
    }
    return nullptr;
}

// Bytes are those that llama.cpp makes, by our vectors too where the processor has them.
static bool repacks_as_llama_cpp_does(ggml_type type, int64_t n_in, int64_t n_out) {
    const size_t               row_bytes = ggml_row_size(type, n_in);
    const pyorch::ExpertTensor layout    = { "", "", ggml_type_name(type), 0, 0, row_bytes * n_out, n_in, n_out };
    if (!pyorch::can_repack(layout)) {
        return true;
    }
    std::vector<char> file(row_bytes * n_out), theirs(file.size()), ours(file.size());
    for (size_t i = 0; i < file.size(); ++i) {
        file[i] = (char) (i * 2654435761u >> 13);
    }
    ggml_tensor experts = {};
    experts.type        = type;
    experts.ne[0]       = n_in;
    experts.ne[1]       = n_out;
    experts.ne[2] = experts.ne[3] = 1;
    ggml_cpu_repack(&experts, n_out, theirs.data(), file.data());
    pyorch::repack(layout, file.data(), ours.data());
    bool               equal   = ours == theirs;
    pyorch::Interleave vectors = type == GGML_TYPE_Q4_K ? pyorch::interleave_q4_k() :
        type == GGML_TYPE_Q2_K                          ? pyorch::interleave_q2_k() :
                                                          nullptr;
    if (vectors && equal) {
        ours.assign(ours.size(), 0);
        for (int64_t row = 0; row < n_out; row += pyorch::INTERLEAVED_ROWS) {
            vectors((const uint8_t *) file.data() + row * row_bytes, row_bytes, (size_t) (n_in / ggml_blck_size(type)),
                (uint8_t *) ours.data() + row * row_bytes);
        }
        equal = ours == theirs;
    }
    if (!equal) {
        fprintf(stderr, "%s: %lld rows of %lld are repacked otherwise than by llama.cpp\n", ggml_type_name(type),
            (long long) n_out, (long long) n_in);
    }
    return equal;
}

// How the matrices of an expert are kept.
enum class Kept { PLAIN, REPACKED, NIBBLES };

// Bit for bit what llama.cpp's kernels give for weights in a buffer, for one token and for a prompt.
static bool computes_kept_experts(
    Kept kept_as, ggml_type type, int64_t n_in, int64_t n_out, int n_tokens, int n_threads) {
    constexpr int64_t          n_expert = 6, n_used = 4;
    const bool                 nibbles = kept_as == Kept::NIBBLES, is_repacked = kept_as == Kept::REPACKED;
    const size_t               matrix_bytes = ggml_row_size(type, n_in) * n_out;
    const pyorch::ExpertTensor layout       = { "", "", ggml_type_name(type), 0, 0, matrix_bytes, n_in, n_out };
    if (is_repacked && !pyorch::can_repack(layout)) {
        return true;
    }
    const std::string name = std::string(ggml_type_name(type)) + " [" + std::to_string(n_out) + "]";
    if (is_repacked && pyorch::layout_name(layout) == "plain") {
        fprintf(stderr, "%s: the layout has no name\n", name.c_str());
        return false;
    }

    std::vector<float> numbers(n_in * n_out * n_expert);
    for (size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = std::sin(0.37f * (float) i) + 0.2f * std::cos(1.7f * (float) i);
        numbers[i] *= nibbles && i % 311 == 0 ? 1e-30f * (float) (i % 2) : 1; // rare exponents
        const size_t row = i / n_in;
        if (!nibbles && row % 5 == 0) { // the largest numbers everywhere
            numbers[i] = i % 3 == 0 || row % 2 == 0 ? -1.0f : 1.0f;
        } else if (!nibbles && row % 7 == 0) { // scales below every exponent
            numbers[i] *= 1e-38f;
        }
    }
    std::vector<char> file(matrix_bytes * n_expert);
    ggml_quantize_chunk(type, numbers.data(), file.data(), 0, n_out * n_expert, n_in, nullptr);

    std::vector<float> results[2];
    for (const bool hooked : { false, true }) {
        ggml_context *        weights = ggml_init({ ggml_tensor_overhead(), nullptr, true });
        ggml_tensor *         experts = ggml_new_tensor_3d(weights, type, n_in, n_out, n_expert);
        ggml_backend_buffer_t buffer  = ggml_backend_alloc_ctx_tensors_from_buft(
            weights, hooked || !is_repacked ? ggml_backend_cpu_buffer_type() : repack_buffers());
        Experts               kept;
        ggml_cpu_expert_hooks hooks = { address, nullptr, is_repacked ? repacked : nullptr, multiply };
        kept.how                    = { pyorch::find_kernel(type, n_in, n_out, is_repacked), nibbles };
        if (hooked) {
            ggml_backend_buffer_clear(buffer, 0xFF); // nobody looks there
            for (int e = 0; e < n_expert; ++e) {
                // As a loader does it: what was read lies behind the place of what it becomes.
                std::vector<char>    block(matrix_bytes + 64);
                std::vector<uint8_t> made;
                const auto *         matrix = (const uint8_t *) file.data() + e * matrix_bytes;
                if (nibbles) {
                    if (!pyorch::encode_nibbles(matrix, n_in, n_out, made)) {
                        fprintf(stderr, "%s: too many rare exponents\n", name.c_str());
                        return false;
                    }
                    kept.matrices.emplace_back(made.begin(), made.end());
                    continue;
                }
                memcpy(block.data() + (is_repacked ? 64 : 0), matrix, matrix_bytes);
                if (is_repacked) {
                    pyorch::repack(layout, block.data() + 64, block.data());
                }
                kept.matrices.push_back(block);
            }
            current = &kept;
        } else {
            ggml_backend_tensor_set(experts, file.data(), 0, file.size());
        }
        ggml_cpu_set_expert_hooks(hooked ? &hooks : nullptr);

        ggml_context * ctx = ggml_init({ (size_t) 64 << 20, nullptr, false });
        const int64_t  n_own =
            n_tokens % 2 == 0 ? 1 : n_used; // inputs of a token: the down matrices have one for each expert
        ggml_tensor * inputs = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in, n_own, n_tokens);
        ggml_tensor * ids    = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, n_tokens);
        for (int i = 0; i < n_in * n_own * n_tokens; ++i) {
            const float value           = std::cos(0.11f * (float) i);
            ((float *) inputs->data)[i] = i / n_in % 3 == 2 ? (value < 0 ? -1.0f : 1.0f) : value;
        }
        for (int i = 0; i < n_used * n_tokens; ++i) {
            ((int32_t *) ids->data)[i] = (int32_t) ((i * 5 + i / n_used) % n_expert);
        }
        ggml_tensor * out   = ggml_mul_mat_id(ctx, experts, inputs, ids);
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, out);
        if (ggml_graph_compute_with_ctx(ctx, graph, n_threads) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "%s: the graph failed\n", name.c_str());
            return false;
        }
        results[hooked].assign((const float *) out->data, (const float *) out->data + ggml_nelements(out));
        ggml_free(ctx);
        ggml_cpu_set_expert_hooks(nullptr);
        ggml_backend_buffer_free(buffer);
        ggml_free(weights);
        if (hooked && kept.n_late == 0) {
            fprintf(stderr, "%s: no expert was left for the second round\n", name.c_str());
            return false;
        }
    }
    if (memcmp(results[0].data(), results[1].data(), results[0].size() * sizeof(float)) != 0) {
        fprintf(stderr, "%s, %d tokens: experts that are kept one by one give other bits\n", name.c_str(), n_tokens);
        return false;
    }
    return true;
}

// A token may pick an expert more than once: each slot gets what it gets in a batch of its own.
static bool computes_an_expert_that_a_token_picks_twice(ggml_type type) {
    constexpr int64_t n_in = 256, n_out = 64, n_expert = 4, n_used = 3, n_tokens = 5;
    ggml_context *    weights = ggml_init({ ggml_tensor_overhead(), nullptr, true });
    ggml_tensor *     experts = ggml_new_tensor_3d(weights, type, n_in, n_out, n_expert);
    if (!ggml_cpu_repack(experts, n_out, nullptr, nullptr)) {
        ggml_free(weights);
        return true;
    }
    std::vector<float> numbers(n_in * n_out * n_expert);
    for (size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = std::sin(0.37f * (float) i);
    }
    std::vector<char> file(ggml_nbytes(experts));
    ggml_quantize_chunk(type, numbers.data(), file.data(), 0, n_out * n_expert, n_in, nullptr);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(weights, repack_buffers());
    ggml_backend_tensor_set(experts, file.data(), 0, file.size());

    std::vector<float> results[2];
    for (const bool alone : { false, true }) {
        const int64_t  slots = alone ? 1 : n_used, columns = n_tokens * n_used / slots;
        ggml_context * ctx    = ggml_init({ (size_t) 8 << 20, nullptr, false });
        ggml_tensor *  inputs = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in, 1, columns);
        ggml_tensor *  ids    = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, slots, columns);
        for (int64_t i = 0; i < n_in * columns; ++i) {
            const int64_t token         = i / n_in / (alone ? n_used : 1);
            ((float *) inputs->data)[i] = std::cos(0.11f * (float) (token * n_in + i % n_in));
        }
        for (int64_t i = 0; i < n_used * n_tokens; ++i) {
            ((int32_t *) ids->data)[i] =
                (int32_t) (n_expert - 1 - i / n_used % 2 - i % n_used / 2); // 3 3 2, 2 2 1, ...
        }
        ggml_tensor * out   = ggml_mul_mat_id(ctx, experts, inputs, ids);
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, out);
        if (ggml_graph_compute_with_ctx(ctx, graph, 2) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "%s: the graph failed\n", ggml_type_name(type));
            return false;
        }
        results[alone].assign((const float *) out->data, (const float *) out->data + ggml_nelements(out));
        ggml_free(ctx);
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(weights);
    if (memcmp(results[0].data(), results[1].data(), results[0].size() * sizeof(float)) != 0) {
        fprintf(stderr, "%s: experts that a token picks twice are computed otherwise\n", ggml_type_name(type));
        return false;
    }
    return true;
}

int main() {
    if (!computes_any_number_of_experts() || !has_its_kernels()) {
        return 1;
    }
    // More inputs than are multiplied together.
    for (const int n_tokens : { 401, 512 }) {
        if (!computes_kept_experts(Kept::REPACKED, GGML_TYPE_Q4_0, 4096, 24, n_tokens, 2) ||
            !computes_kept_experts(Kept::REPACKED, GGML_TYPE_Q4_K, 4096, 24, n_tokens, 2) ||
            !computes_kept_experts(Kept::PLAIN, GGML_TYPE_Q8_0, 4096, 21, n_tokens, 2) ||
            !computes_kept_experts(Kept::PLAIN, GGML_TYPE_F16, 4096, 21, n_tokens, 2)) {
            return 1;
        }
    }
    for (const ggml_type type : { GGML_TYPE_BF16, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_0, GGML_TYPE_F32 }) {
        for (const int64_t n_in : { 64, 192, 1184 }) {
            for (const int n_tokens : { 1, 2, 5, 33 }) {
                for (const int n_threads : { 1, 3 }) {
                    if (!computes_kept_experts(Kept::PLAIN, type, n_in, 40, n_tokens, n_threads) ||
                        !computes_kept_experts(Kept::PLAIN, type, n_in, 333, n_tokens, n_threads)) {
                        return 1;
                    }
                }
            }
        }
    }
    for (const int64_t n_in : { 64, 192, 1184 }) {
        for (const int n_tokens : { 1, 2, 33, 512 }) {
            for (const int n_threads : { 1, 2, 3 }) {
                if (!computes_kept_experts(Kept::NIBBLES, GGML_TYPE_BF16, n_in, 40, n_tokens, n_threads) ||
                    !computes_kept_experts(Kept::NIBBLES, GGML_TYPE_BF16, n_in, 333, n_tokens, n_threads)) {
                    return 1;
                }
            }
        }
    }
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        if (!ggml_is_quantized((ggml_type) type) || ggml_quantize_requires_imatrix((ggml_type) type)) {
            continue;
        }
        for (const int64_t n_out : { 64, 40, 20 }) { // groups of 16, 8 and 4 rows
            for (const int n_tokens : { 1, 2, 4, 9, 31 }) {
                if (!computes_kept_experts(Kept::REPACKED, (ggml_type) type, 512, n_out, n_tokens, 2)) {
                    return 1;
                }
            }
            if (!computes_kept_experts(Kept::REPACKED, (ggml_type) type, 512, n_out, 9, 5) ||
                !repacks_as_llama_cpp_does((ggml_type) type, 1280, n_out)) {
                return 1;
            }
        }
        if (!computes_an_expert_that_a_token_picks_twice((ggml_type) type)) {
            return 1;
        }
    }
    return 0;
}
