#include "loading/codec.h"

#include "base/checksum.h"
#include "model/layout.h"

namespace pyorch {

bool Codec::intact(const MoeLayer & layer, int role, int expert, const char * read) const {
    const size_t index = expert * layer.tensors.size() + role;
    return checksum(read, layer.tensors[role].stride) == layer.pack->checksum[index];
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

} // namespace

const Codec & plain_codec(Form) {
    static const Plain plain;
    return plain;
}

const Codec & repacking_codec(Form) {
    static const Repacking repacking;
    return repacking;
}

} // namespace pyorch
