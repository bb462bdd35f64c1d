#include "api/api.h"
#include "base/cpu_backend.h"
#include "base/cpu_time.h"
#include "codecs/exponent_codecs.h"
#include "codecs/nibble.h"

#include "ggml.h"
#include "pyorch.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

using namespace pyorch;

namespace {

static_assert((int) PlaneCodec::STORED == PYORCH_CODEC_STORED && (int) PlaneCodec::ZSTD == PYORCH_CODEC_ZSTD &&
        (int) PlaneCodec::TABLE == PYORCH_CODEC_TABLE && (int) PlaneCodec::NIBBLE == PYORCH_CODEC_NIBBLE,
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

// Measures both forms alternately; the best time of each counts.
double nibble_pace(uint64_t n_in, uint64_t n_out) {
    constexpr uint64_t BYTES = 32u << 20;
    constexpr uint64_t TILE  = 16; // rows of a call by mul_mat_id
    constexpr int      N     = 5;

    const auto     dot      = cpu_backend().type_traits(GGML_TYPE_BF16)->vec_dot;
    const uint64_t bytes    = 2 * n_in * n_out;
    const uint64_t n_copies = std::max<uint64_t>(1, BYTES / bytes);

    std::mt19937                       random{ 1 };
    std::normal_distribution<float>    weights(0, 0.02f);
    std::vector<uint16_t>              plain(n_in * n_out);
    std::vector<uint8_t>               nibbles;
    std::vector<std::vector<uint16_t>> all_plain;
    std::vector<std::vector<uint8_t>>  all_nibbles;
    for (uint16_t & number : plain) {
        number = ggml_fp32_to_bf16(weights(random)).bits;
    }
    if (!encode_nibbles((const uint8_t *) plain.data(), n_in, n_out, nibbles)) {
        throw Failure(PYORCH_INVALID, "matrices of this shape have no nibbles");
    }
    all_plain.assign(n_copies, plain);
    all_nibbles.assign(n_copies, nibbles);

    std::vector<uint8_t> rows(TILE * 2 * n_in);
    float                result;
    double               best[2] = { INFINITY, INFINITY };
    for (int i = 0; i < 2 * N; ++i) {
        const uint64_t begin = thread_cpu_ns(); // not wall time, because other threads may run
        for (uint64_t copy = 0; copy < n_copies; ++copy) {
            for (uint64_t row = 0; row < n_out; ++row) {
                const uint8_t * of = (const uint8_t *) (all_plain[copy].data() + row * n_in);
                if (i % 2 == 1) {
                    if (row % TILE == 0) {
                        decode_nibbles(
                            all_nibbles[copy].data(), n_in, n_out, row, std::min(TILE, n_out - row), rows.data());
                    }
                    of = rows.data() + row % TILE * 2 * n_in;
                }
                dot((int) n_in, &result, 0, of, 0, plain.data(), 0, 1);
            }
        }
        best[i % 2] = std::min(best[i % 2], (double) (thread_cpu_ns() - begin));
    }
    return best[1] / best[0];
}

} // namespace

extern "C" {

uint64_t pyorch_nibble_bytes(const char * type, uint64_t n_in, uint64_t n_out) {
    const uint64_t bytes = nibble_bytes(n_in, n_out);
    return has_nibbles(numbers_of(type), n_in) && bytes < 2 * n_in * n_out ? bytes : 0;
}

pyorch_status pyorch_nibble_pace(uint64_t n_in, uint64_t n_out, double * ratio) {
    return guarded([&] { *ratio = nibble_pace(n_in, n_out); });
}

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
