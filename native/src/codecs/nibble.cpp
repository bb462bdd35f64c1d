#include "codecs/nibble.h"

#include "codecs/plane_kernels.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

namespace pyorch {
namespace {

constexpr size_t   HEADER = 64;
constexpr size_t   N_IN   = 16; // its offset in the header
constexpr int      ESCAPE = 15;
constexpr uint32_t COLUMN = 0xffffff; // of an escape
constexpr uint64_t RARITY = 256;      // numbers for each escape, at least

constexpr uint64_t HALF       = PLANE_BLOCK / 2;
constexpr size_t   HALF_BYTES = 2 * HALF; // of the last half block of a row: codes, signs and mantissas

uint64_t row_bytes(uint64_t n_in) {
    return n_in / PLANE_BLOCK * NIBBLE_BLOCK_BYTES + (n_in % PLANE_BLOCK ? HALF_BYTES : 0);
}

uint64_t escapes_offset(uint64_t n_in, uint64_t n_out) { return HEADER + n_out * row_bytes(n_in); }

uint32_t word(const uint8_t * from, uint64_t index) {
    uint32_t value;
    memcpy(&value, from + 4 * index, sizeof(value));
    return value;
}

} // namespace

bool has_nibbles(Numbers type, uint64_t n_in) {
    return type == Numbers::BF16 && n_in > 0 && n_in % HALF == 0 && n_in <= COLUMN;
}

uint64_t nibble_bytes(uint64_t n_in, uint64_t n_out) {
    const uint64_t bytes = escapes_offset(n_in, n_out) + 4 * (n_out + 1 + n_in * n_out / RARITY);
    return (bytes + HEADER - 1) / HEADER * HEADER;
}

bool encode_nibbles(const uint8_t * raw, uint64_t n_in, uint64_t n_out, std::vector<uint8_t> & to) {
    const auto number = [&](uint64_t i) { return (uint32_t) raw[2 * i] | (uint32_t) raw[2 * i + 1] << 8; };

    std::array<std::array<uint64_t, 256>, 2> counts = {}; // two, because equal neighbours would wait for one counter
    for (uint64_t i = 0; i < n_in * n_out; ++i) {
        ++counts[i % 2][number(i) >> 7 & 0xff];
    }
    std::array<int, 256> commonest;
    std::iota(commonest.begin(), commonest.end(), 0);
    const auto count = [&](int e) { return counts[0][e] + counts[1][e]; };
    std::stable_sort(commonest.begin(), commonest.end(), [&](int a, int b) { return count(a) > count(b); });
    uint64_t                 n_escapes = n_in * n_out;
    std::array<uint8_t, 256> code_of;
    code_of.fill(ESCAPE);
    to.assign(nibble_bytes(n_in, n_out), 0);
    for (int code = 0; code < ESCAPE; ++code) {
        to[code]                 = (uint8_t) commonest[code];
        code_of[commonest[code]] = (uint8_t) code;
        n_escapes -= count(commonest[code]);
    }
    if (n_escapes > n_in * n_out / RARITY || to.size() >= 2 * n_in * n_out) {
        return false;
    }
    const auto row = (uint32_t) n_in;
    memcpy(to.data() + N_IN, &row, sizeof(row));

    uint8_t * block  = to.data() + HEADER;
    uint8_t * before = to.data() + escapes_offset(n_in, n_out);
    uint8_t * escape = before + 4 * (n_out + 1);
    uint32_t  n      = 0;
    for (uint64_t row = 0; row < n_out; ++row) {
        for (uint64_t first = 0; first < n_in; first += HALF) {
            const uint64_t half = first / HALF % 2;
            uint8_t *      of   = block + first / PLANE_BLOCK * NIBBLE_BLOCK_BYTES;
            for (uint64_t i = 0; i < HALF; ++i) {
                const uint32_t bits = number(row * n_in + first + i), e = bits >> 7 & 0xff;
                const size_t   at = nibble_place(i);
                of[at] |= (uint8_t) (code_of[e] << 4 * half);
                of[HALF + half * HALF + at] = (uint8_t) (bits >> 15 << 7 | (bits & 0x7f));
                if (code_of[e] == ESCAPE) {
                    const auto value = (uint32_t) (e << 24 | (first + i));
                    memcpy(escape + 4 * n++, &value, sizeof(value));
                }
            }
        }
        block += row_bytes(n_in);
        memcpy(before + 4 * (row + 1), &n, sizeof(n));
    }
    return true;
}

uint64_t nibble_row(const uint8_t * stored, uint64_t bytes) {
    const uint64_t n_in = bytes < HEADER ? 0 : word(stored + N_IN, 0);
    return has_nibbles(Numbers::BF16, n_in) ? n_in : 0;
}

bool check_nibbles(const uint8_t * stored, uint64_t bytes, uint64_t n_in, uint64_t n_out) {
    if (nibble_row(stored, bytes) != n_in || bytes != nibble_bytes(n_in, n_out)) {
        return false;
    }
    const uint8_t * before = stored + escapes_offset(n_in, n_out);
    uint32_t        n      = 0;
    for (uint64_t row = 0; row <= n_out; ++row) {
        if (word(before, row) < n) {
            return false;
        }
        n = word(before, row);
    }
    if (n > n_in * n_out / RARITY) {
        return false;
    }
    uint32_t largest = 0;
    for (uint32_t i = 0; i < n; ++i) {
        largest = std::max(largest, word(before + 4 * (n_out + 1), i) & COLUMN);
    }
    return largest < n_in;
}

void decode_nibbles(
    const uint8_t * stored, uint64_t n_in, uint64_t n_out, uint64_t first, uint64_t n, uint8_t * rows, Simd simd) {
    const auto      decode  = plane_kernels(simd).nibbles;
    const uint8_t * before  = stored + escapes_offset(n_in, n_out);
    const uint8_t * escapes = before + 4 * (n_out + 1);
    for (uint64_t row = first; row < first + n; ++row, rows += 2 * n_in) {
        const uint8_t * blocks = stored + HEADER + row * row_bytes(n_in);
        decode(stored, blocks, n_in / PLANE_BLOCK, rows);
        if (n_in % PLANE_BLOCK != 0) {
            uint8_t last[NIBBLE_BLOCK_BYTES] = {}, numbers[2 * PLANE_BLOCK];
            memcpy(last, blocks + n_in / PLANE_BLOCK * NIBBLE_BLOCK_BYTES, HALF_BYTES);
            decode(stored, last, 1, numbers);
            memcpy(rows + 2 * (n_in - HALF), numbers, 2 * HALF);
        }
        for (uint32_t i = word(before, row), end = word(before, row + 1); i < end; ++i) {
            const uint32_t escape = word(escapes, i), e = escape >> 24;
            uint8_t *      at = rows + 2 * (uint64_t) (escape & COLUMN);
            at[0] |= (uint8_t) (e << 7);
            at[1] |= (uint8_t) (e >> 1);
        }
    }
}

} // namespace pyorch
