// Planes and codecs give back every bit, whatever the bits, with every kind of vectors that this processor has; and no
// damage makes them leave the bytes that they were given.

#include "codecs/exponent_codecs.h"
#include "codecs/nibble.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

using namespace pyorch;

static std::mt19937_64 rng{ 1 };

static void require(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

using Bytes = std::vector<uint8_t>;

static Bytes random_bytes(size_t n) {
    Bytes bytes(n);
    for (uint8_t & byte : bytes) {
        byte = (uint8_t) rng();
    }
    return bytes;
}

static std::vector<Simd> simds() {
    std::vector<Simd> some;
    for (Simd simd : { Simd::SCALAR, Simd::NEON, Simd::AVX2, Simd::AVX512 }) {
        if (has_simd(simd)) {
            some.push_back(simd);
        }
    }
    return some;
}

// Of weights that are near zero, as those of a model: few exponents make up nearly all.
static Bytes exponents_of_weights(size_t n) {
    std::normal_distribution<float> weights(0, 0.02f);
    Bytes                           e(n);
    for (uint8_t & exponent : e) {
        const float weight = weights(rng);
        uint32_t    bits;
        memcpy(&bits, &weight, sizeof(bits));
        exponent = (uint8_t) (bits >> 23);
    }
    return e;
}

static void check_planes(Numbers type, size_t n) {
    const Bytes raw = random_bytes(n * number_bytes(type)); // not-a-numbers, infinities and denormals among them
    Bytes       e(n), sm(sm_bytes(type, n));
    split(type, raw.data(), n, e.data(), sm.data());
    const Bytes foreign = random_bytes(n); // bytes that may be no exponents at all
    Bytes       reference(raw.size());
    merge(type, foreign.data(), sm.data(), n, reference.data(), Simd::SCALAR);
    for (Simd simd : simds()) {
        Bytes merged(raw.size());
        merge(type, e.data(), sm.data(), n, merged.data(), simd);
        require(merged == raw, "numbers come back from their planes");
        merge(type, foreign.data(), sm.data(), n, merged.data(), simd);
        require(merged == reference, "all vectors merge alike");
        std::copy(e.begin(), e.end(), merged.end() - (long) n);
        merge(type, merged.data() + merged.size() - n, sm.data(), n, merged.data(), simd);
        require(merged == raw, "exponents may lie at the end of what they are merged into");
        if (n % PLANE_BLOCK == 0) {
            std::copy(sm.begin(), sm.end(), merged.end() - sm.size());
            merge(type, e.data(), merged.data() + merged.size() - sm.size(), n, merged.data(), simd);
            require(merged == raw, "signs and mantissas may lie at the end of what they are merged into");
        }
    }
}

// Any shard of whole blocks can be recovered by itself.
static void check_shards(Numbers type, size_t n, size_t n_shards) {
    const Bytes raw = random_bytes(n * number_bytes(type));
    Bytes       e(n), sm(sm_bytes(type, n)), merged(raw.size());
    split(type, raw.data(), n, e.data(), sm.data());
    const size_t step   = shard_numbers(n, n_shards);
    size_t       n_made = 0;
    for (size_t first = 0; first < n; first += step, ++n_made) {
        const size_t of_shard = std::min(step, n - first);
        require(recover(type, PlaneCodec::STORED, e.data() + first, of_shard, sm.data() + sm_offset(type, first),
                    of_shard, merged.data() + first * number_bytes(type)),
            "a stored shard is recovered");
    }
    require(n_made <= n_shards && merged == raw, "shards make up the matrix");
}

static void check_codec(PlaneCodec codec, int level, const Bytes & e) {
    Bytes stored;
    if (!encode(codec, level, e.data(), e.size(), stored)) {
        return;
    }
    require(stored.size() < e.size(), "what is encoded is smaller");
    for (Numbers type : { Numbers::BF16, Numbers::F16, Numbers::F32 }) {
        const Bytes sm = random_bytes(sm_bytes(type, e.size()));
        Bytes       expected(e.size() * number_bytes(type));
        merge(type, e.data(), sm.data(), e.size(), expected.data(), Simd::SCALAR);
        for (Simd simd : simds()) {
            Bytes decoded(e.size()), recovered(expected.size());
            require(decode(codec, stored.data(), stored.size(), decoded.data(), e.size(), simd) && decoded == e,
                "exponents come back");
            require(recover(type, codec, stored.data(), stored.size(), sm.data(), e.size(), recovered.data(), simd) &&
                    recovered == expected,
                "and are merged on the way");
        }
    }
}

// Each vector is as long as it says, so that a sanitizer sees a byte too far.
static void check_damage(PlaneCodec codec, const Bytes & stored, size_t n) {
    Bytes damaged = stored;
    switch (rng() % 4) {
    case 0: damaged.resize(rng() % (stored.size() + 1)); break;
    case 1: damaged.resize(stored.size() + 1 + rng() % 100, (uint8_t) rng()); break;
    case 2: damaged = random_bytes(rng() % (stored.size() + 1)); break;
    default: damaged[rng() % damaged.size()] ^= (uint8_t) (1 << rng() % 8);
    }
    damaged.shrink_to_fit();
    Bytes      reference(n), sm(sm_bytes(Numbers::BF16, n)), raw(2 * n);
    const bool is_whole = decode(codec, damaged.data(), damaged.size(), reference.data(), n, Simd::SCALAR);
    require(!is_whole || damaged.size() == stored.size() || codec != PlaneCodec::TABLE,
        "a table of another size is refused");
    for (Simd simd : simds()) {
        Bytes e(n);
        require(decode(codec, damaged.data(), damaged.size(), e.data(), n, simd) == is_whole,
            "all vectors refuse the same chunks");
        require(!is_whole || e == reference, "and make the same of the others");
        require(
            recover(Numbers::BF16, codec, damaged.data(), damaged.size(), sm.data(), n, raw.data(), simd) == is_whole,
            "so does recover()");
    }
}

// n weights in BF16, of which a few have exponents that no others have.
static Bytes bf16_weights(size_t n, size_t n_rare) {
    Bytes raw(2 * n), sm = random_bytes(sm_bytes(Numbers::BF16, n)), e = exponents_of_weights(n);
    for (size_t i = 0; i < n_rare; ++i) {
        e[rng() % n] = (uint8_t) rng();
    }
    merge(Numbers::BF16, e.data(), sm.data(), n, raw.data());
    return raw;
}

static void check_nibbles_of(uint64_t n_in, uint64_t n_out) {
    const Bytes raw = bf16_weights(n_in * n_out, n_in * n_out / 400);
    Bytes       stored;
    require(encode_nibbles(raw.data(), n_in, n_out, stored) && stored.size() == nibble_bytes(n_in, n_out) &&
            check_nibbles(stored.data(), stored.size(), n_in, n_out),
        "weights have nibbles");
    for (Simd simd : simds()) {
        Bytes all(raw.size());
        require(decode(PlaneCodec::NIBBLE, stored.data(), stored.size(), all.data(), all.size(), simd) && all == raw,
            "all rows come back");
        for (int i = 0; i < 20; ++i) {
            const uint64_t first = rng() % n_out, n = 1 + rng() % std::min<uint64_t>(16, n_out - first);
            Bytes          rows(2 * n_in * n);
            decode_nibbles(stored.data(), n_in, n_out, first, n, rows.data(), simd);
            require(std::equal(rows.begin(), rows.end(), raw.begin() + (long) (2 * n_in * first)), "and so do any");
        }
    }
    for (int i = 0; i < 2000; ++i) {
        Bytes damaged = stored;
        for (uint64_t n = 1 + rng() % 3; n > 0; --n) { // rows, and what says where their escapes are
            const size_t from = rng() % 2 ? nibble_bytes(n_in, n_out) - n_in * n_out / 64 - 4 * n_out - 68 : 0;
            damaged[from + rng() % (damaged.size() - from)] ^= (uint8_t) (1 << rng() % 8);
        }
        Bytes all(raw.size());
        if (check_nibbles(damaged.data(), damaged.size(), n_in, n_out)) {
            decode_nibbles(damaged.data(), n_in, n_out, 0, n_out, all.data()); // a sanitizer sees a byte too far
        }
        damaged.resize(rng() % damaged.size());
        damaged.shrink_to_fit();
        require(!check_nibbles(damaged.data(), damaged.size(), n_in, n_out) &&
                !decode(PlaneCodec::NIBBLE, damaged.data(), damaged.size(), all.data(), all.size()),
            "a part of it is refused");
    }
    const Bytes noise = bf16_weights(n_in * n_out, n_in * n_out);
    require(!encode_nibbles(noise.data(), n_in, n_out, stored), "noise has no nibbles");
}

int main() {
    check_nibbles_of(64, 64);
    check_nibbles_of(192, 50);
    check_nibbles_of(1184, 33);
    require(best_simd() == simds().back(), "the widest vectors are used");
    for (Numbers type : { Numbers::BF16, Numbers::F16, Numbers::F32 }) {
        for (size_t n : { 1, 63, 64, 65, 2048, 4096 + 64, 5000 }) {
            check_planes(type, n);
            for (size_t n_shards : { 1, 3, 4 }) {
                check_shards(type, n, n_shards);
            }
        }
    }
    for (size_t n : { 100, 4096, 4100, 20000 }) {
        std::vector<Bytes> planes = { exponents_of_weights(n), Bytes(n, 7), Bytes(n, 0), random_bytes(n) };
        planes.push_back(exponents_of_weights(n));
        for (size_t i = 0; i < n; i += 2) {
            planes.back()[i] = (uint8_t) rng(); // half of them are escapes
        }
        planes.push_back(Bytes(n, 1));
        std::fill(planes.back().end() - 50, planes.back().end(), 200); // the last ones, of a block that is not whole
        for (const Bytes & e : planes) {
            check_codec(PlaneCodec::TABLE, 0, e);
            for (int level : { -5, 1, 9 }) {
                check_codec(PlaneCodec::ZSTD, level, e);
            }
        }
        for (PlaneCodec codec : { PlaneCodec::ZSTD, PlaneCodec::TABLE }) {
            Bytes       stored;
            const Bytes e = exponents_of_weights(n);
            require(encode(codec, 0, e.data(), n, stored), "exponents of weights become smaller");
            for (int i = 0; i < 200; ++i) {
                check_damage(codec, stored, n);
            }
        }
    }
    Bytes       stored;
    const Bytes noise = random_bytes(4096);
    for (PlaneCodec codec : { PlaneCodec::STORED, PlaneCodec::ZSTD, PlaneCodec::TABLE }) {
        require(!encode(codec, 0, noise.data(), noise.size(), stored), "noise is not made smaller");
    }
    uint8_t raw[4];
    require(!decode((PlaneCodec) 9, raw, 4, raw, 4), "an unknown codec is refused");
    return 0;
}
