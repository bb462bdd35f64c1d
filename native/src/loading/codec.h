// The decode stage: what becomes of a block between the last read into it and its publication.
//
// A codec turns the bytes that were read into what kernels compute with, in place: a block is as large as model/form.h
// says, and that includes whatever room the codec needs.

#pragma once

#include "model/form.h"

namespace pyorch {

class Codec {
public:
    virtual ~Codec() = default;

    // block [block_bytes]; read: where in it the extent of the matrix begins, now that it is there. Returns where the
    // matrix begins, or null if what was read is damaged. Called by several threads at once, without a lock.
    virtual const char * decode(const ExpertTensor & tensor, char * block, char * read) const = 0;

    // False: decode returns at once, on whatever thread. Else who starts reads leaves it to another thread.
    virtual bool computes() const { return true; }

    // Before that, of what was read from a pack: whether the checksum is that of the pack.
    virtual bool intact(const MoeLayer & layer, int role, int expert, const char * read) const;

    // Instead of that, of a compressed expert: makes the matrix of what is stored of it, as it lies in the model, step
    // by step, of which several threads may each take some. e, sm: where the regions begin in memory. False if a chunk
    // is not what was packed.
    virtual bool recover(
        const MoeLayer & layer, int role, int expert, int step, const char * e, const char * sm, char * block) const;

    // Steps of that.
    static int recovery_steps(const MoeLayer & layer, int role, int expert);
};

// Matrices stay as they were read.
const Codec & plain_codec();

// Matrices as they lie in the file come into the order in which the kernels are fastest (model/layout.h).
const Codec & repacking_codec();

// Nothing is decoded or checked: for reads that are only counted.
const Codec & no_codec();

} // namespace pyorch
