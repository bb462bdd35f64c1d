#include "model/layout.h"

#include "base/cpu_backend.h"
#include "codecs/interleave.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>

namespace pyorch {

ggml_type type_of(const ExpertTensor & tensor) {
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        const char * name = ggml_type_name((ggml_type) type);
        if (name && tensor.type == name) {
            return (ggml_type) type;
        }
    }
    return GGML_TYPE_COUNT;
}

namespace {

// The largest group of rows in any order.
constexpr int64_t GROUP = 16;

// Rows are copied before they are overwritten; this many fit into a core's first cache with their result.
constexpr int64_t SLAB_BYTES = 8 * 1024;

// A tensor with the type and shape by which llama.cpp selects kernels.
ggml_tensor experts_of(const ExpertTensor & tensor) {
    ggml_tensor t = {};
    t.type        = type_of(tensor);
    t.ne[0]       = tensor.n_in;
    t.ne[1]       = tensor.n_out;
    t.ne[2] = t.ne[3] = 1;
    return t;
}

} // namespace

namespace {

// Returns bytes without a period.
std::vector<char> pattern_of(size_t n) {
    std::vector<char> bytes(n);
    uint32_t          state = 1;
    for (char & byte : bytes) {
        state = state * 1664525 + 1013904223;
        byte  = (char) (state >> 24);
    }
    return bytes;
}

// Returns our interleaving if it makes the same bytes as llama.cpp's here, otherwise null.
Interleave checked(Interleave interleave, ggml_type type) {
    constexpr int64_t N_BLOCKS = 3;
    ggml_tensor       rows     = {};
    rows.type                  = type;
    rows.ne[0]                 = N_BLOCKS * ggml_blck_size(type);
    rows.ne[1]                 = INTERLEAVED_ROWS;
    rows.ne[2] = rows.ne[3]     = 1;
    const size_t      row_bytes = ggml_row_size(type, rows.ne[0]);
    std::vector<char> from      = pattern_of(INTERLEAVED_ROWS * row_bytes), theirs(from.size()), ours(from.size());
    if (!interleave || !cpu_backend().repack(&rows, rows.ne[1], nullptr, nullptr) ||
        !cpu_backend().repack(&rows, rows.ne[1], theirs.data(), from.data())) {
        return nullptr;
    }
    interleave((const uint8_t *) from.data(), row_bytes, N_BLOCKS, (uint8_t *) ours.data());
    return ours == theirs ? interleave : nullptr;
}

Interleave interleave_of(ggml_type type) {
    static const Interleave q4_k = checked(interleave_q4_k(), GGML_TYPE_Q4_K);
    static const Interleave q2_k = checked(interleave_q2_k(), GGML_TYPE_Q2_K);
    return type == GGML_TYPE_Q4_K ? q4_k : type == GGML_TYPE_Q2_K ? q2_k : nullptr;
}

} // namespace

bool can_repack(const ExpertTensor & tensor) {
    const ggml_tensor experts = experts_of(tensor);
    return experts.type != GGML_TYPE_COUNT && cpu_backend().repack(&experts, experts.ne[1], nullptr, nullptr);
}

void repack(const ExpertTensor & tensor, const char * from, char * to) {
    const ggml_tensor experts   = experts_of(tensor);
    const int64_t     row_bytes = (int64_t) ggml_row_size(experts.type, experts.ne[0]);
    const int64_t     n_rows    = std::max<int64_t>(SLAB_BYTES / row_bytes / GROUP, 1) * GROUP;

    const Interleave                      interleave = interleave_of(experts.type);
    static thread_local std::vector<char> slab;
    slab.resize(n_rows * row_bytes);
    for (int64_t row = 0; row < tensor.n_out; row += n_rows) {
        const int64_t n = std::min(n_rows, tensor.n_out - row);
        memcpy(slab.data(), from + row * row_bytes, n * row_bytes);
        if (!interleave || n % INTERLEAVED_ROWS != 0) {
            cpu_backend().repack(&experts, n, to + row * row_bytes, slab.data());
            continue;
        }
        for (int64_t group = 0; group < n; group += INTERLEAVED_ROWS) {
            interleave((const uint8_t *) slab.data() + group * row_bytes, (size_t) row_bytes,
                (size_t) (experts.ne[0] / ggml_blck_size(experts.type)), (uint8_t *) to + (row + group) * row_bytes);
        }
    }
}

std::string layout_name(const ExpertTensor & tensor) {
    if (!can_repack(tensor)) {
        return PLAIN;
    }
    // The order is identified by its result for a pattern. Only the grouping of rows depends on their number.
    ExpertTensor pattern    = tensor;
    pattern.n_in            = std::min<int64_t>(tensor.n_in, 1024);
    pattern.n_out           = std::min<int64_t>(tensor.n_out, GROUP + tensor.n_out % GROUP);
    std::vector<char> bytes = pattern_of(ggml_row_size(experts_of(tensor).type, pattern.n_in) * pattern.n_out);
    repack(pattern, bytes.data(), bytes.data());
    uint64_t hash = 14695981039346656037u; // FNV-1a
    for (const char byte : bytes) {
        hash = (hash ^ (uint8_t) byte) * 1099511628211u;
    }
    return format("%s-repacked-%016llx", tensor.type.c_str(), (unsigned long long) hash);
}

} // namespace pyorch
