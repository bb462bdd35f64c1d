// The decode stage: turns the bytes that were read into the matrix that kernels compute with.
//
// It works in place: model/form.h gives the size of a block, with the room that the codec needs.

#pragma once

#include "model/form.h"

namespace pyorch {

class Codec {
public:
    virtual ~Codec() = default;

    // block [block_bytes]; read: the matrix's extent in it, now whole. Returns the address of the matrix, or null if
    // the bytes are damaged. Several threads call at once, without a lock.
    virtual const char * decode(const ExpertTensor & tensor, char * block, char * read) const = 0;

    // False: decode() returns at once, on any thread. True: a thread that starts reads leaves it to another thread.
    virtual bool computes() const { return true; }

    // For bytes of a pack, before decode(): whether their checksum is the pack's.
    virtual bool intact(const MoeLayer & layer, int role, int expert, const char * read) const;

    // For a compressed expert, in place of decode(): recovers the matrix as the model has it from its stored parts, in
    // steps, which several threads may share. e, sm: addresses of the regions. False if a chunk is damaged.
    virtual bool recover(
        const MoeLayer & layer, int role, int expert, int step, const char * e, const char * sm, char * block) const;

    // The number of steps of recover().
    static int recovery_steps(const MoeLayer & layer, int role, int expert);
};

// Leaves matrices as they were read.
const Codec & plain_codec();

// Brings matrices from the file's order into the order in which the kernels are fastest (model/layout.h).
const Codec & repacking_codec();

// Decodes and checks nothing: for reads that are only counted.
const Codec & no_codec();

} // namespace pyorch
