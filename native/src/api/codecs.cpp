#include "api/api.h"
#include "codecs/exponent_codecs.h"

#include "pyorch.h"

#include <cstring>

using namespace pyorch;

namespace {

static_assert((int) PlaneCodec::STORED == PYORCH_CODEC_STORED && (int) PlaneCodec::ZSTD == PYORCH_CODEC_ZSTD &&
        (int) PlaneCodec::TABLE == PYORCH_CODEC_TABLE,
    "one numbering of codecs");

PlaneCodec checked(int32_t codec) {
    if (codec < 0 || codec >= N_PLANE_CODECS || codec == FORMER_LZ4) {
        throw Failure(PYORCH_INVALID, format("there is no codec %d", codec));
    }
    return (PlaneCodec) codec;
}

Numbers checked(const char * type) {
    const Numbers numbers = numbers_of(type);
    if (numbers == Numbers::BYTES) {
        throw Failure(PYORCH_INVALID, format("numbers of the type %s cannot be taken apart", type));
    }
    return numbers;
}

} // namespace

extern "C" {

uint64_t pyorch_sm_bytes(const char * type, uint64_t n) { return sm_bytes(numbers_of(type), n); }

uint64_t pyorch_shard_numbers(uint64_t n, uint64_t n_shards) { return shard_numbers(n, n_shards == 0 ? 1 : n_shards); }

pyorch_status pyorch_split(const char * type, const void * raw, uint64_t n, void * e, void * sm) {
    return guarded([&] { split(checked(type), (const uint8_t *) raw, n, (uint8_t *) e, (uint8_t *) sm); });
}

pyorch_status pyorch_encode(int32_t codec, int32_t level, const void * raw, uint64_t n, void * to, uint64_t * stored) {
    return guarded([&] {
        std::vector<uint8_t> encoded;
        *stored = 0;
        if (encode(checked(codec), level, (const uint8_t *) raw, n, encoded)) {
            memcpy(to, encoded.data(), encoded.size());
            *stored = encoded.size();
        }
    });
}

pyorch_status pyorch_decode(int32_t codec, const void * stored, uint64_t stored_bytes, void * raw, uint64_t n) {
    return guarded([&] {
        const PlaneCodec known = checked(codec);
        if (!decode(known, (const uint8_t *) stored, stored_bytes, (uint8_t *) raw, n)) {
            throw Failure(PYORCH_FORMAT,
                format("%llu bytes are not what %s makes of %llu", (unsigned long long) stored_bytes, name_of(known),
                    (unsigned long long) n));
        }
    });
}

pyorch_status pyorch_recover(
    const char * type, int32_t codec, const void * e, uint64_t e_bytes, const void * sm, uint64_t n, void * raw) {
    return guarded([&] {
        const PlaneCodec known = checked(codec);
        if (!recover(checked(type), known, (const uint8_t *) e, e_bytes, (const uint8_t *) sm, n, (uint8_t *) raw)) {
            throw Failure(PYORCH_FORMAT,
                format("%llu bytes are not what %s makes of %llu exponents", (unsigned long long) e_bytes,
                    name_of(known), (unsigned long long) n));
        }
    });
}

} // extern "C"
