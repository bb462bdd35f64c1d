#include "loading/codec.h"

#include "base/checksum.h"
#include "codecs/exponent_codecs.h"
#include "codecs/nibble.h"
#include "model/layout.h"

namespace pyorch {

bool Codec::intact(const MoeLayer & layer, int role, int expert, const char * read) const {
    const size_t         index  = expert * layer.tensors.size() + role;
    const ExpertTensor & tensor = layer.tensors[role];
    const uint64_t       bytes  = matrix_bytes(layer, role);
    return checksum(read, bytes) == layer.pack->checksum[index] &&
        (!layer.pack->nibbles[role] || check_nibbles((const uint8_t *) read, bytes, tensor.n_in, tensor.n_out));
}

namespace {

class Plain : public Codec {
public:
    const char * decode(const ExpertTensor &, char *, char * read) const override { return read; }

    bool computes() const override { return false; }
};

// The block begins at a page or a cache line, the file's alignment is less.
class Repacking : public Codec {
public:
    const char * decode(const ExpertTensor & tensor, char * block, char * read) const override {
        if (!can_repack(tensor)) {
            return read;
        }
        repack(tensor, read, block);
        return block;
    }
};

class Nothing : public Plain {
public:
    bool intact(const MoeLayer &, int, int, const char *) const override { return true; }
    bool recover(const MoeLayer &, int, int, int, const char *, const char *, char *) const override { return true; }
};

} // namespace

const Codec & no_codec() {
    static const Nothing nothing;
    return nothing;
}

const Codec & plain_codec() {
    static const Plain plain;
    return plain;
}

const Codec & repacking_codec() {
    static const Repacking repacking;
    return repacking;
}

// One step for each chunk: a shard is decoded and merged while it is in a core's cache. Signs and mantissas are
// checked.
int Codec::recovery_steps(const MoeLayer & layer, int role, int expert) {
    const size_t id = expert * layer.tensors.size() + role;
    return (int) (layer.pack->first[id + 1] - layer.pack->first[id]);
}

bool Codec::recover(
    const MoeLayer & layer, int role, int expert, int step, const char * e, const char * sm, char * block) const {
    const PackedLayer & pack   = *layer.pack;
    const size_t        id     = expert * layer.tensors.size() + role;
    const PackedChunk * chunks = pack.chunks.data() + pack.first[id];
    const PackedChunk & chunk  = chunks[step];
    const PackedChunk & last   = pack.chunks[pack.first[id + 1] - 1]; // the signs and mantissas, or all
    const auto * const  stored = (const uint8_t *) (&chunk == &last ? sm : e) + chunk.offset;
    if (checksum((const char *) stored, chunk.stored) != chunk.checksum) {
        return false;
    }
    if (chunk.plane == 0) {
        return pyorch::decode(chunk.codec, stored, chunk.stored, (uint8_t *) block, chunk.raw);
    }
    if (&chunk == &last) {
        return true;
    }
    const Numbers type = numbers_of(layer.tensors[role].type);
    size_t        from = 0; // its first number
    for (const PackedChunk * before = chunks; before != &chunk; ++before) {
        from += before->raw;
    }
    return pyorch::recover(type, chunk.codec, stored, chunk.stored,
        (const uint8_t *) sm + last.offset + sm_offset(type, from), chunk.raw,
        (uint8_t *) block + from * number_bytes(type));
}

} // namespace pyorch
