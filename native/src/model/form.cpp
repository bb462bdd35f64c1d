#include "model/form.h"

#include <algorithm>

namespace pyorch {

static constexpr uint64_t CACHE_LINE = 64;

static uint64_t round_up(uint64_t bytes, uint64_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

static bool reads_directly(const ExpertTensor & tensor) {
    return tensor.stride >= DIRECT_MIN_BYTES;
}

// From the beginning of the first matrix of a record to the end of the last.
static uint64_t packed_bytes(const MoeLayer & layer) {
    uint64_t bytes = 0;
    for (const auto & tensor : layer.tensors) {
        bytes = round_up(bytes, CACHE_LINE) + tensor.stride;
    }
    return bytes;
}

Extent in_model(const MoeLayer & layer, int role, int expert) {
    const ExpertTensor & tensor = layer.tensors[role];
    return { tensor.file, tensor.offset + expert * tensor.stride, tensor.stride, reads_directly(tensor), role, role };
}

Extents extents(const MoeLayer & layer, int expert, Form form) {
    Extents of;
    if (form == Form::ABSENT) {
        return of;
    }
    const int n_roles = (int) layer.tensors.size();
    if (layer.pack) {
        const uint64_t bytes = packed_bytes(layer);
        const bool     direct = bytes >= DIRECT_MIN_BYTES;
        of.all[of.n++] = { layer.pack->file, layer.pack->offset[expert], bytes, direct, 0, n_roles - 1 };
        return of;
    }
    for (int role = 0; role < n_roles; ++role) {
        of.all[of.n++] = in_model(layer, role, expert);
    }
    return of;
}

// Memory of one matrix that comes from the model's own files.
static uint64_t block_bytes(const ExpertTensor & tensor) {
    // A direct read starts at the page before the matrix and ends at the page after it.
    return reads_directly(tensor) ? round_up(tensor.stride, PAGE) + PAGE : round_up(tensor.stride, CACHE_LINE);
}

uint64_t block_offset(const MoeLayer & layer, int role, Form form) {
    uint64_t offset = 0;
    if (form == Form::ABSENT) {
        return offset;
    }
    if (layer.pack) {
        for (int r = 0; r < role; ++r) {
            offset = round_up(offset + layer.tensors[r].stride, CACHE_LINE);
        }
        return offset;
    }
    // Those of whole pages come first, so that each of them begins at one.
    const bool direct = reads_directly(layer.tensors[role]);
    for (int r = 0; r < (int) layer.tensors.size(); ++r) {
        const bool before = reads_directly(layer.tensors[r]) == direct ? r < role : !direct;
        offset += before ? block_bytes(layer.tensors[r]) : 0;
    }
    return offset;
}

uint64_t slot_bytes(const MoeLayer & layer, Form form) {
    if (form == Form::ABSENT) {
        return 0;
    }
    if (layer.pack) {
        const uint64_t bytes = packed_bytes(layer);
        return round_up(bytes, bytes >= DIRECT_MIN_BYTES ? PAGE : CACHE_LINE);
    }
    uint64_t bytes = 0;
    for (const auto & tensor : layer.tensors) {
        bytes += block_bytes(tensor);
    }
    const bool direct = std::any_of(layer.tensors.begin(), layer.tensors.end(), reads_directly);
    return direct ? round_up(bytes, PAGE) : bytes;
}

uint64_t record_bytes(const MoeLayer & layer) {
    return round_up(packed_bytes(layer), PAGE);
}

} // namespace pyorch
