// In which forms an expert can be in memory, where each is read from, and what memory it takes.
//
// A form is made of parts, and each part has a slot of its own. In the part that kernels compute with, there is a block
// for each matrix of the expert. What a reader brings into a block becomes what the kernels want by a codec
// (loading/codec.h); of a compressed expert, by way of its two stored parts. The residency table, the loader and the
// banks ask here.
//
// A slot of experts that come from a pack is laid out as a record of the pack is, so that one read fills it; a slot of
// a stored part as its region there.

#pragma once

#include "model/model_map.h"

namespace pyorch {

// The pools of ZipMoE, section 3.2.
enum class Form : uint8_t {
    ABSENT,     // no memory
    FULL,       // every matrix as it lies in the model: what the kernels compute with
    COMPRESSED, // both stored parts: needs no reading
    SM_ONLY,    // one of them: the other is to be read
    E_ONLY,
};

inline constexpr int N_FORMS = 5;

// Parts as bits.
constexpr uint32_t bit_of(Part part) { return 1u << part; }

inline constexpr uint32_t STORED_PARTS = bit_of(PART_E) | bit_of(PART_SM);

constexpr uint32_t parts_of(Form form) {
    return form == Form::FULL    ? bit_of(PART_MATRICES) :
        form == Form::COMPRESSED ? STORED_PARTS :
        form == Form::SM_ONLY    ? bit_of(PART_SM) :
        form == Form::E_ONLY     ? bit_of(PART_E) :
                                   0;
}

// Of an expert of which these parts are there, beside what kernels compute with.
constexpr Form stored_form(uint32_t parts) {
    return (parts & STORED_PARTS) == STORED_PARTS ? Form::COMPRESSED :
        parts & bit_of(PART_SM)                   ? Form::SM_ONLY :
        parts & bit_of(PART_E)                    ? Form::E_ONLY :
                                                    Form::ABSENT;
}

// Memory of the stored parts that a form keeps of an expert.
uint64_t stored_bytes(const MoeLayer & layer, Form form);

// Whether the experts of a layer come by way of stored parts.
inline bool is_compressed(const MoeLayer & layer) { return layer.pack && layer.pack->compressed; }

// Bytes of a file of the map that end up side by side in a slot: a part, one matrix of an expert, or several in order.
struct Extent {
    int      file;
    uint64_t offset;
    uint64_t bytes;
    bool     direct; // may be read page by page past both ends: the slot has room for it
    int      role;   // the first matrix in it
    int      last_role;
    Part     part; // whose slot it is
};

// What is read to bring an expert into memory, in the order of the kernels.
struct Extents {
    int    n = 0;
    Extent all[PYORCH_MAX_ROLES];

    const Extent * begin() const { return all; }
    const Extent * end() const { return all + n; }
};

// there: the stored parts that are in memory.
Extents extents(const MoeLayer & layer, int expert, uint32_t there = 0);

// What an extent has of one of its matrices, as an extent. No bytes: nothing.
Extent extent_of(const MoeLayer & layer, int expert, const Extent & extent, int role);

// One matrix of an expert as the model's own files have it, wherever else it lies.
Extent in_model(const MoeLayer & layer, int role, int expert);

// Where the block of a matrix begins in the slot of what kernels compute with. A block that is read directly begins at
// a page if the slot does, but for those behind the first one of a record.
uint64_t block_offset(const MoeLayer & layer, int role);

// Bytes of a matrix there.
uint64_t matrix_bytes(const MoeLayer & layer, int role);

// Memory of one part of an expert; whole pages if it, or a block of it, is read directly.
uint64_t slot_bytes(const MoeLayer & layer, Part part);

// Bytes that an expert takes in a pack that is not compressed: whole pages.
uint64_t record_bytes(const MoeLayer & layer);

// Says how large the slots of stored parts are. Compressed experts differ a little in size: slots of all layers with as
// large experts are alike, so that memory goes from one to another as it is.
void give_part_slots(const std::vector<MoeLayer> & layers, std::vector<std::shared_ptr<PackedLayer>> & packed);

} // namespace pyorch
