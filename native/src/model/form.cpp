#include "model/form.h"

#include <algorithm>

namespace pyorch {

// An expert matrix smaller than this is read through the page cache: the alignment of a direct read
// would cost more memory than it saves time.
static constexpr uint64_t DIRECT_MIN_BYTES = 128 * 1024;

static constexpr uint64_t CACHE_LINE = 64;

static uint64_t round_up(uint64_t bytes, uint64_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

static bool reads_directly(const ExpertTensor & tensor) {
    return tensor.stride >= DIRECT_MIN_BYTES;
}

Extent extent(const ExpertTensor & tensor, int expert, Form form) {
    if (form == Form::ABSENT) {
        return { tensor.file, tensor.offset, 0, false };
    }
    return { tensor.file, tensor.offset + expert * tensor.stride, tensor.stride, reads_directly(tensor) };
}

uint64_t block_bytes(const ExpertTensor & tensor, Form form) {
    if (form == Form::ABSENT) {
        return 0;
    }
    // A direct read starts at the page before the matrix and ends at the page after it.
    return reads_directly(tensor) ? round_up(tensor.stride, PAGE) + PAGE : round_up(tensor.stride, CACHE_LINE);
}

uint64_t block_offset(const MoeLayer & layer, int role, Form form) {
    // Those of whole pages come first, so that each of them begins at one.
    uint64_t   offset = 0;
    const bool direct = reads_directly(layer.tensors[role]);
    for (int r = 0; r < (int) layer.tensors.size(); ++r) {
        const bool before = reads_directly(layer.tensors[r]) == direct ? r < role : !direct;
        offset += before ? block_bytes(layer.tensors[r], form) : 0;
    }
    return offset;
}

uint64_t slot_bytes(const MoeLayer & layer, Form form) {
    uint64_t bytes = 0;
    for (const auto & tensor : layer.tensors) {
        bytes += block_bytes(tensor, form);
    }
    const bool direct = std::any_of(layer.tensors.begin(), layer.tensors.end(), reads_directly);
    return direct ? round_up(bytes, PAGE) : bytes;
}

} // namespace pyorch
