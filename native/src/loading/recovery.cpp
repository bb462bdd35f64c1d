// Matrices, made of their stored parts: the chunks of a compressed pack, checked, decoded and merged.

#include "base/checksum.h"
#include "codecs/exponent_codecs.h"
#include "loading/codec.h"

namespace pyorch {

// Shard by shard, so that what is decoded is still in a core's cache when it is merged.
bool Codec::recover(const MoeLayer & layer, int role, int expert, const char * e, const char * sm,
                    char * block) const {
    const PackedLayer &  pack   = *layer.pack;
    const size_t         id     = expert * layer.tensors.size() + role;
    const PackedChunk *  chunks = pack.chunks.data() + pack.first[id];
    const size_t         n      = pack.first[id + 1] - pack.first[id];
    const PackedChunk &  last   = chunks[n - 1]; // signs and mantissas, or all
    const auto           intact = [](const PackedChunk & chunk, const char * region) {
        return checksum(region + chunk.offset, chunk.stored) == chunk.checksum;
    };
    if (!intact(last, sm)) {
        return false;
    }
    if (last.plane == 0) {
        return pyorch::decode(last.codec, (const uint8_t *) sm + last.offset, last.stored, (uint8_t *) block, last.raw);
    }
    const Numbers type = numbers_of(layer.tensors[role].type);
    const auto *  sms  = (const uint8_t *) sm + last.offset;
    auto *        to   = (uint8_t *) block;
    size_t        from = 0; // the first number of a shard
    for (const PackedChunk * chunk = chunks; chunk != &last; ++chunk) {
        if (!intact(*chunk, e) || !pyorch::recover(type, chunk->codec, (const uint8_t *) e + chunk->offset,
            chunk->stored, sms + sm_offset(type, from), chunk->raw, to + from * number_bytes(type))) {
            return false;
        }
        from += chunk->raw;
    }
    return true;
}

} // namespace pyorch
