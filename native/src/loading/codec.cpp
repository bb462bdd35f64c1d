#include "loading/codec.h"

namespace pyorch {
namespace {

// Kernels compute with what lies in the file.
class Plain : public Codec {
public:
    const char * decode(const ExpertTensor &, char *, char * read) const override {
        return read;
    }

    bool computes() const override {
        return false;
    }
};

} // namespace

const Codec & codec_of(Form) {
    static const Plain plain;
    return plain;
}

} // namespace pyorch
