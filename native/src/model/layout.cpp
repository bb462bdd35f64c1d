#include "model/layout.h"

#include "base/cpu_backend.h"

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

// A group of rows is at most so many in any order.
constexpr int64_t GROUP = 16;

// Rows are copied before they are written over; so many fit beside what they become into a core's first cache.
constexpr int64_t SLAB_BYTES = 8 * 1024;

// What llama.cpp chooses kernels by: type and shape.
ggml_tensor experts_of(const ExpertTensor & tensor) {
    ggml_tensor t = {};
    t.type        = type_of(tensor);
    t.ne[0]       = tensor.n_in;
    t.ne[1]       = tensor.n_out;
    t.ne[2] = t.ne[3] = 1;
    return t;
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

    static thread_local std::vector<char> slab;
    slab.resize(n_rows * row_bytes);
    for (int64_t row = 0; row < tensor.n_out; row += n_rows) {
        const int64_t n = std::min(n_rows, tensor.n_out - row);
        memcpy(slab.data(), from + row * row_bytes, n * row_bytes);
        cpu_backend().repack(&experts, n, to + row * row_bytes, slab.data());
    }
}

std::string layout_name(const ExpertTensor & tensor) {
    if (!can_repack(tensor)) {
        return PLAIN;
    }
    // The order is known by what becomes of bytes that all differ in some way. Rows count by what groups they make.
    ExpertTensor pattern = tensor;
    pattern.n_in         = std::min<int64_t>(tensor.n_in, 1024);
    pattern.n_out        = std::min<int64_t>(tensor.n_out, GROUP + tensor.n_out % GROUP);
    std::vector<char> bytes(ggml_row_size(experts_of(tensor).type, pattern.n_in) * pattern.n_out);
    uint32_t          state = 1;
    for (char & byte : bytes) {
        state = state * 1664525 + 1013904223;
        byte  = (char) (state >> 24);
    }
    repack(pattern, bytes.data(), bytes.data());
    uint64_t hash = 14695981039346656037u; // FNV-1a
    for (const char byte : bytes) {
        hash = (hash ^ (uint8_t) byte) * 1099511628211u;
    }
    return format("%s-repacked-%016llx", tensor.type.c_str(), (unsigned long long) hash);
}

} // namespace pyorch
