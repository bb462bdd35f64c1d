// The forms of an expert in memory, the reads for each, and the memory of each.
//
// A form has parts, and each part has its own slot. The part for kernels has a block for each matrix of the expert. A
// codec (loading/codec.h) turns the bytes that were read into a block into the bytes for kernels; a compressed expert
// has two stored parts, from which the block is recovered. The residency table, the loader and the banks use these
// functions.
//
// If experts come from a pack, a slot has the layout of the pack's record, and the slot of a stored part that of its
// region, so that one read fills it.

#pragma once

#include "model/model_map.h"

namespace pyorch {

// The forms, which are the pools of ZipMoE, section 3.2.
enum class Form : uint8_t {
    ABSENT,     // no memory
    FULL,       // every matrix as in the model, for kernels
    COMPRESSED, // both stored parts: needs no read
    SM_ONLY,    // one stored part: the other must be read
    E_ONLY,
};

inline constexpr int N_FORMS = 5;

// A part as a bit.
constexpr uint32_t bit_of(Part part) { return 1u << part; }

inline constexpr uint32_t STORED_PARTS = bit_of(PART_E) | bit_of(PART_SM);

constexpr uint32_t parts_of(Form form) {
    return form == Form::FULL    ? bit_of(PART_MATRICES) :
        form == Form::COMPRESSED ? STORED_PARTS :
        form == Form::SM_ONLY    ? bit_of(PART_SM) :
        form == Form::E_ONLY     ? bit_of(PART_E) :
                                   0;
}

// The form of an expert with these stored parts in memory.
constexpr Form stored_form(uint32_t parts) {
    return (parts & STORED_PARTS) == STORED_PARTS ? Form::COMPRESSED :
        parts & bit_of(PART_SM)                   ? Form::SM_ONLY :
        parts & bit_of(PART_E)                    ? Form::E_ONLY :
                                                    Form::ABSENT;
}

// Returns the memory of the stored parts that a form of an expert keeps.
uint64_t stored_bytes(const MoeLayer & layer, Form form);

// Returns whether the experts of a layer are read as stored parts.
inline bool is_compressed(const MoeLayer & layer) { return layer.pack && layer.pack->compressed; }

// A range of a file of the map that is contiguous in a slot: a part, one matrix of an expert, or several in order.
struct Extent {
    int      file;
    uint64_t offset;
    uint64_t bytes;
    bool     direct; // direct reads may extend to whole pages at both ends: the slot has room for it
    int      role;   // the first matrix in it
    int      last_role;
    Part     part; // of the slot
};

// The reads that bring an expert into memory, in the order of the kernels.
struct Extents {
    int    n = 0;
    Extent all[PYORCH_MAX_ROLES];

    const Extent * begin() const { return all; }
    const Extent * end() const { return all + n; }
};

// Returns the reads of an expert. there: the stored parts in memory.
Extents extents(const MoeLayer & layer, int expert, uint32_t in_memory = 0);

// Returns the bytes of one matrix in an extent; with 0 bytes if it has none.
Extent extent_of(const MoeLayer & layer, int expert, const Extent & extent, int role);

// Returns one matrix of an expert in the model's own files, also if a pack has it.
Extent in_model(const MoeLayer & layer, int role, int expert);

// Returns the offset of a matrix's block in the slot for kernels. If the slot starts at a page, so does a block for
// direct reads, except for all but the first block of a record.
uint64_t block_offset(const MoeLayer & layer, int role);

// Returns the bytes of a matrix in that slot.
uint64_t matrix_bytes(const MoeLayer & layer, int role);

// Returns the memory of one part of an expert; whole pages if the part, or a block in it, is read directly.
uint64_t slot_bytes(const MoeLayer & layer, Part part);

// Returns the bytes of an expert in a pack without compression: whole pages.
uint64_t record_bytes(const MoeLayer & layer);

// Sets the sizes of the slots of stored parts. Compressed experts differ a little in size. Layers with equally large
// experts get equal slots, so that memory can move between them.
void give_part_slots(const std::vector<MoeLayer> & layers, std::vector<std::shared_ptr<PackedLayer>> & packed);

} // namespace pyorch
