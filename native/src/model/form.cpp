#include "model/form.h"

#include "codecs/nibble.h"

#include <algorithm>
#include <map>

namespace pyorch {

static constexpr uint64_t CACHE_LINE = 64;

static bool reads_directly(const ExpertTensor & tensor) { return tensor.stride >= DIRECT_MIN_BYTES; }

uint64_t matrix_bytes(const MoeLayer & layer, int role) {
    const ExpertTensor & tensor = layer.tensors[role];
    return layer.pack && layer.pack->nibbles[role] ? nibble_bytes(tensor.n_in, tensor.n_out) : tensor.stride;
}

// Returns the bytes from the start of a record's first matrix to the end of its last one.
static uint64_t packed_bytes(const MoeLayer & layer) {
    uint64_t bytes = 0;
    for (int role = 0; role < (int) layer.tensors.size(); ++role) {
        bytes = round_up(bytes, CACHE_LINE) + matrix_bytes(layer, role);
    }
    return bytes;
}

Extent in_model(const MoeLayer & layer, int role, int expert) {
    const ExpertTensor & tensor = layer.tensors[role];
    return { tensor.file, tensor.offset + expert * tensor.stride, tensor.stride, reads_directly(tensor), role, role,
        PART_MATRICES };
}

Extents extents(const MoeLayer & layer, int expert, uint32_t in_memory) {
    Extents   of;
    const int n_roles = (int) layer.tensors.size();
    if (is_compressed(layer)) {
        for (Part part : { PART_E, PART_SM }) {
            const uint64_t bytes = layer.pack->part_bytes[part][expert];
            if (!(in_memory & bit_of(part)) && bytes > 0) {
                of.all[of.n++] = { layer.pack->file, layer.pack->part_offset[part][expert], bytes,
                    layer.pack->part_slot[part] >= DIRECT_MIN_BYTES, 0, n_roles - 1, part };
            }
        }
        return of;
    }
    if (layer.lacks(expert)) {
        return of;
    }
    if (layer.pack) {
        const uint64_t bytes  = packed_bytes(layer);
        const bool     direct = bytes >= DIRECT_MIN_BYTES;
        of.all[of.n++] = { layer.pack->file, layer.pack->offset[expert], bytes, direct, 0, n_roles - 1, PART_MATRICES };
        return of;
    }
    for (int role = 0; role < n_roles; ++role) {
        of.all[of.n++] = in_model(layer, role, expert);
    }
    return of;
}

static Part part_of(const PackedChunk & chunk, bool is_last) { return chunk.plane == 0 || is_last ? PART_SM : PART_E; }

Extent extent_of(const MoeLayer & layer, int expert, const Extent & e, int role) {
    if (e.part == PART_MATRICES && e.role == e.last_role) {
        return e;
    }
    Extent of = e;
    of.role = of.last_role = role;
    if (e.part == PART_MATRICES) {
        of.offset = e.offset + block_offset(layer, role) - block_offset(layer, e.role);
        of.bytes  = matrix_bytes(layer, role);
        return of;
    }
    const PackedLayer & pack  = *layer.pack;
    const size_t        id    = expert * layer.tensors.size() + role;
    uint64_t            begin = UINT64_MAX, end = 0;
    for (size_t i = pack.first[id]; i < pack.first[id + 1]; ++i) {
        if (part_of(pack.chunks[i], i + 1 == pack.first[id + 1]) == e.part) {
            begin = std::min(begin, pack.chunks[i].offset);
            end   = std::max(end, pack.chunks[i].offset + pack.chunks[i].stored);
        }
    }
    of.bytes  = end > begin ? end - begin : 0;
    of.offset = of.bytes > 0 ? pack.part_offset[e.part][expert] + begin : e.offset;
    return of;
}

// Returns the memory of one matrix that is read from the model's own files.
static uint64_t block_bytes(const ExpertTensor & tensor) {
    // A direct read starts at the page before the matrix and ends at the page after it.
    return reads_directly(tensor) ? round_up(tensor.stride, PAGE) + PAGE : round_up(tensor.stride, CACHE_LINE);
}

uint64_t block_offset(const MoeLayer & layer, int role) {
    uint64_t offset = 0;
    if (layer.pack) {
        for (int r = 0; r < role; ++r) {
            offset = round_up(offset + matrix_bytes(layer, r), CACHE_LINE);
        }
        return offset;
    }
    // Blocks of whole pages come first, so that each starts at a page.
    const bool direct = reads_directly(layer.tensors[role]);
    for (int r = 0; r < (int) layer.tensors.size(); ++r) {
        const bool before = reads_directly(layer.tensors[r]) == direct ? r < role : !direct;
        offset += before ? block_bytes(layer.tensors[r]) : 0;
    }
    return offset;
}

uint64_t slot_bytes(const MoeLayer & layer, Part part) {
    if (part != PART_MATRICES) {
        return is_compressed(layer) ? layer.pack->part_slot[part] : 0;
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

uint64_t record_bytes(const MoeLayer & layer) { return round_up(packed_bytes(layer), PAGE); }

void give_part_slots(const std::vector<MoeLayer> & layers, std::vector<std::shared_ptr<PackedLayer>> & packed) {
    for (Part part : { PART_E, PART_SM }) {
        std::map<uint64_t, uint64_t> most; // by the bytes of an expert
        for (size_t i = 0; i < layers.size(); ++i) {
            uint64_t & bytes = most[layers[i].expert_bytes()];
            for (const uint64_t stored : packed[i]->part_bytes[part]) {
                bytes = std::max(bytes, round_up(stored, PAGE));
            }
        }
        for (size_t i = 0; i < layers.size(); ++i) {
            packed[i]->part_slot[part] = packed[i]->compressed ? most[layers[i].expert_bytes()] : 0;
        }
    }
}

uint64_t stored_bytes(const MoeLayer & layer, Form form) {
    uint64_t bytes = 0;
    for (Part part : { PART_E, PART_SM }) {
        bytes += parts_of(form) & bit_of(part) ? slot_bytes(layer, part) : 0;
    }
    return bytes;
}

} // namespace pyorch
