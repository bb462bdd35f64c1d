#include "codecs/exponent_codecs.h"

#include "codecs/nibble.h"
#include "codecs/plane_kernels.h"

#include "zstd.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>

namespace pyorch {
namespace {

constexpr size_t  TABLE_BYTES = 8;
constexpr int     ESCAPE      = 7;
constexpr uint8_t NO_CODE     = 0xff;

// Exponents that are looked up at once and then merged: they fit into a core's first cache with their result.
constexpr size_t STEP = 2048;
static_assert(STEP % PLANE_BLOCK == 0, "a step is whole blocks");

// Reads the exponents of a stored chunk once, in order.
class TableReader {
public:
    // ok() is false if the chunk cannot have n exponents.
    TableReader(const uint8_t * stored, size_t stored_bytes, size_t n, Simd simd) :
            lookup(plane_kernels(simd).lookup), table(stored), n_left(n) {
        const size_t n_codes = n_blocks_of(n) * CODE_BYTES;
        if (stored_bytes < TABLE_BYTES + n_codes || !is_filled_up(stored + TABLE_BYTES, n)) {
            return;
        }
        codes   = stored + TABLE_BYTES;
        escapes = codes + n_codes;
        end     = stored + stored_bytes;
    }

    bool ok() const { return escapes != nullptr; }

    // Returns whether no numbers and no escapes are left.
    bool is_at_end() const { return ok() && n_left == 0 && escapes == end; }

    // Reads the next n: whole blocks, or all that are left. Returns false if the chunk is damaged.
    bool read(uint8_t * e, size_t n) {
        const size_t whole = n / PLANE_BLOCK;
        escapes            = lookup(table, codes, whole, escapes, end, e);
        codes += whole * CODE_BYTES;
        n_left -= n;
        const size_t rest = n % PLANE_BLOCK;
        if (ok() && rest != 0) {
            uint8_t block[PLANE_BLOCK];
            escapes = lookup(table, codes, 1, escapes, end, block);
            memcpy(e + whole * PLANE_BLOCK, block, ok() ? rest : 0);
        }
        return ok();
    }

private:
    const PlaneKernels::Lookup lookup;
    const uint8_t * const      table;
    const uint8_t *            codes   = nullptr;
    const uint8_t *            escapes = nullptr;
    const uint8_t *            end     = nullptr;
    size_t                     n_left;

    // Returns whether the codes after the last exponent are zeros: an escape there would have no number.
    static bool is_filled_up(const uint8_t * codes, size_t n) {
        const size_t rest = n % PLANE_BLOCK;
        if (rest == 0) {
            return true;
        }
        uint64_t bits[3];
        memcpy(bits, codes + n / PLANE_BLOCK * CODE_BYTES, sizeof(bits));
        return (bits[0] | bits[1] | bits[2]) >> rest == 0;
    }
};

bool encode_table(const uint8_t * raw, size_t n, std::vector<uint8_t> & to) {
    // Four counters each, because neighbours are often equal, and one counter would wait for itself.
    std::array<std::array<size_t, 256>, 4> counts = {};
    for (size_t i = 0; i < n; ++i) {
        ++counts[i % 4][raw[i]];
    }
    std::array<int, 256> commonest;
    std::iota(commonest.begin(), commonest.end(), 0);
    for (int value = 0; value < 256; ++value) {
        counts[0][value] += counts[1][value] + counts[2][value] + counts[3][value];
    }
    std::stable_sort(commonest.begin(), commonest.end(), [&](int a, int b) { return counts[0][a] > counts[0][b]; });

    std::array<uint8_t, 256> code_of;
    code_of.fill(ESCAPE);
    size_t n_escapes = n;
    to.assign(TABLE_BYTES, 0);
    for (int code = 0; code < ESCAPE; ++code) {
        to[code]                 = (uint8_t) commonest[code];
        code_of[commonest[code]] = (uint8_t) code;
        n_escapes -= counts[0][commonest[code]];
    }
    const size_t n_codes = n_blocks_of(n) * CODE_BYTES;
    if (TABLE_BYTES + n_codes + n_escapes >= n) {
        return false;
    }
    to.resize(TABLE_BYTES + n_codes + n_escapes);
    uint8_t * codes   = to.data() + TABLE_BYTES;
    uint8_t * escapes = codes + n_codes;
    for (size_t first = 0; first < n; first += PLANE_BLOCK, codes += CODE_BYTES) {
        uint64_t bits[3] = {};
        for (size_t i = 0; i < std::min(PLANE_BLOCK, n - first); ++i) {
            const uint64_t code = code_of[raw[first + i]];
            bits[0] |= (code & 1) << i;
            bits[1] |= (code >> 1 & 1) << i;
            bits[2] |= (code >> 2) << i;
            if (code == ESCAPE) {
                *escapes++ = raw[first + i];
            }
        }
        memcpy(codes, bits, sizeof(bits));
    }
    return true;
}

// A thread keeps it, because making its tables for each chunk takes too long.
ZSTD_DCtx * zstd_reader() {
    struct Free {
        void operator()(ZSTD_DCtx * context) const { ZSTD_freeDCtx(context); }
    };
    static thread_local const std::unique_ptr<ZSTD_DCtx, Free> context(ZSTD_createDCtx());
    return context.get();
}

bool encode_zstd(int level, const uint8_t * raw, size_t n, std::vector<uint8_t> & to) {
    to.resize(ZSTD_compressBound(n));
    const size_t stored = ZSTD_compress(to.data(), to.size(), raw, n, level);
    if (ZSTD_isError(stored) || stored >= n) {
        return false;
    }
    to.resize(stored);
    return true;
}

} // namespace

const char * name_of(PlaneCodec codec) {
    switch (codec) {
    case PlaneCodec::STORED: return "stored";
    case PlaneCodec::ZSTD: return "zstd";
    case PlaneCodec::TABLE: return "table";
    case PlaneCodec::NIBBLE: return "nibble";
    }
    return "";
}

bool encode(PlaneCodec codec, int level, const uint8_t * raw, size_t n, std::vector<uint8_t> & to) {
    switch (codec) {
    case PlaneCodec::ZSTD: return encode_zstd(level, raw, n, to);
    case PlaneCodec::TABLE: return encode_table(raw, n, to);
    case PlaneCodec::NIBBLE:
        return level > 0 && n % (2 * (size_t) level) == 0 && has_nibbles(Numbers::BF16, level) &&
            encode_nibbles(raw, level, n / level / 2, to);
    default: return false;
    }
}

bool decode(PlaneCodec codec, const uint8_t * stored, size_t stored_bytes, uint8_t * raw, size_t n, Simd simd) {
    switch (codec) {
    case PlaneCodec::STORED:
        if (stored_bytes != n) {
            return false;
        }
        memcpy(raw, stored, n);
        return true;
    case PlaneCodec::ZSTD: {
        ZSTD_DCtx * reader = zstd_reader();
        return reader && ZSTD_decompressDCtx(reader, raw, n, stored, stored_bytes) == n;
    }
    case PlaneCodec::TABLE: {
        TableReader reader(stored, stored_bytes, n, simd);
        return reader.ok() && reader.read(raw, n) && reader.is_at_end();
    }
    case PlaneCodec::NIBBLE: {
        const uint64_t n_in = nibble_row(stored, stored_bytes), n_out = n_in ? n / n_in / 2 : 0;
        if (n_in == 0 || n != 2 * n_in * n_out || !check_nibbles(stored, stored_bytes, n_in, n_out)) {
            return false;
        }
        decode_nibbles(stored, n_in, n_out, 0, n_out, raw, simd);
        return true;
    }
    }
    return false;
}

bool recover(Numbers type, PlaneCodec codec, const uint8_t * e_stored, size_t e_bytes, const uint8_t * sm, size_t n,
    uint8_t * raw, Simd simd) {
    if (codec == PlaneCodec::STORED) {
        if (e_bytes != n) {
            return false;
        }
        merge(type, e_stored, sm, n, raw, simd);
        return true;
    }
    if (codec != PlaneCodec::TABLE) {
        uint8_t * e = raw + n * (number_bytes(type) - 1); // at the end of raw, without memory of its own
        if (!decode(codec, e_stored, e_bytes, e, n, simd)) {
            return false;
        }
        merge(type, e, sm, n, raw, simd);
        return true;
    }
    TableReader reader(e_stored, e_bytes, n, simd);
    if (!reader.ok()) {
        return false;
    }
    uint8_t exponents[STEP];
    for (size_t first = 0; first < n; first += STEP) {
        const size_t step = std::min(STEP, n - first);
        if (!reader.read(exponents, step)) {
            return false;
        }
        merge(type, exponents, sm + sm_offset(type, first), step, raw + first * number_bytes(type), simd);
    }
    return reader.is_at_end();
}

} // namespace pyorch
