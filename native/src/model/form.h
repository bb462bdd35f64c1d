// In which forms an expert can be in memory, where each is read from, and what memory it takes.
//
// A form is made of one block for each matrix of the expert; the blocks of an expert lie together, in its slot.
// What a reader brings into a block becomes what the form promises by the form's codec (loading/codec.h). The
// residency table, the loader and the banks ask here, and know no form by name: a new one is added here and there.

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

// Bytes of one matrix of an expert, in a file of the map.
struct Extent {
    int      file;
    uint64_t offset;
    uint64_t bytes;
    bool     direct; // may be read page by page past both ends: the block has room for it
};

// What is read to bring a matrix of an expert into a form.
Extent extent(const ExpertTensor & tensor, int expert, Form form);

// Memory of one matrix of an expert, and where in the expert's slot it begins. A block that is read directly begins
// at a page if the slot does.
uint64_t block_bytes(const ExpertTensor & tensor, Form form);
uint64_t block_offset(const MoeLayer & layer, int role, Form form);

// Memory of one expert; whole pages if a block of it is read directly.
uint64_t slot_bytes(const MoeLayer & layer, Form form);

} // namespace pyorch
