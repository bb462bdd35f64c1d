// In which forms an expert can be in memory, where each is read from, and what memory it takes.
//
// A form is made of one block for each matrix of the expert; the blocks of an expert lie together, in its slot.
// What a reader brings into a block becomes what the form promises by the form's codec (loading/codec.h). The
// residency table, the loader and the banks ask here, and know no form by name: a new one is added here and there.
//
// A slot of experts that come from a pack is laid out as a record of the pack is, so that one read fills it.

#pragma once

#include "model/model_map.h"

namespace pyorch {

enum class Form : uint8_t {
    ABSENT, // no memory
    FULL,   // every matrix as it lies in the file: what the kernels compute with
};

inline constexpr int N_FORMS = 2;

// The form that kernels compute with, into which the table loads.
inline constexpr Form COMPUTABLE = Form::FULL;

// Bytes of a file of the map that end up side by side in a slot: one matrix of an expert, or several in order.
struct Extent {
    int      file;
    uint64_t offset;
    uint64_t bytes;
    bool     direct; // may be read page by page past both ends: the slot has room for it
    int      role;   // the first matrix in it
    int      last_role;
};

// What is read to bring an expert into a form, in the order of the kernels.
struct Extents {
    int    n = 0;
    Extent all[PYORCH_MAX_ROLES];

    const Extent * begin() const { return all; }
    const Extent * end() const { return all + n; }
};

Extents extents(const MoeLayer & layer, int expert, Form form);

// One matrix of an expert as the model's own files have it, wherever else it lies.
Extent in_model(const MoeLayer & layer, int role, int expert);

// Where in the expert's slot the block of a matrix begins. A block that is read directly begins at a page if the slot
// does, but for those behind the first one of a record.
uint64_t block_offset(const MoeLayer & layer, int role, Form form);

// Memory of one expert; whole pages if a block of it is read directly.
uint64_t slot_bytes(const MoeLayer & layer, Form form);

// Bytes that an expert takes in a pack: whole pages.
uint64_t record_bytes(const MoeLayer & layer);

} // namespace pyorch
