// The reference: the results of the other kernels are compared with these.

#include "codecs/plane_kernels.h"

#include <cstring>

namespace pyorch {
namespace {

void store16(uint8_t * to, uint32_t bits) {
    const uint16_t number = (uint16_t) bits;
    memcpy(to, &number, sizeof(number));
}

void merge_bf16(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    uint8_t block[PLANE_BLOCK];
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += sizeof(block), raw += 2 * PLANE_BLOCK) {
        memcpy(block, sm, sizeof(block));
        for (size_t i = 0; i < PLANE_BLOCK; ++i) {
            store16(raw + 2 * i, (uint32_t) (block[i] & 0x80) << 8 | (uint32_t) e[i] << 7 | (block[i] & 0x7f));
        }
    }
}

void merge_f16(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    uint8_t low[PLANE_BLOCK];
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += sizeof(low) + 24, raw += 2 * PLANE_BLOCK) {
        uint64_t high[3];
        memcpy(low, sm, sizeof(low));
        memcpy(high, sm + sizeof(low), sizeof(high));
        for (size_t i = 0; i < PLANE_BLOCK; ++i) {
            const uint32_t mantissa = low[i] | (high[0] >> i & 1) << 8 | (high[1] >> i & 1) << 9;
            store16(raw + 2 * i, (uint32_t) (high[2] >> i & 1) << 15 | (uint32_t) (e[i] & 0x1f) << 10 | mantissa);
        }
    }
}

void merge_f32(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    uint8_t block[3][PLANE_BLOCK];
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += sizeof(block), raw += 4 * PLANE_BLOCK) {
        memcpy(block, sm, sizeof(block));
        for (size_t i = 0; i < PLANE_BLOCK; ++i) {
            const uint32_t high   = block[2][i];
            const uint32_t number = (high & 0x80) << 24 | (uint32_t) e[i] << 23 | (high & 0x7f) << 16 |
                (uint32_t) block[1][i] << 8 | block[0][i];
            memcpy(raw + 4 * i, &number, sizeof(number));
        }
    }
}

const uint8_t * lookup(const uint8_t * table, const uint8_t * codes, size_t n_blocks, const uint8_t * escapes,
    const uint8_t * end, uint8_t * e) {
    for (; n_blocks > 0; --n_blocks, codes += CODE_BYTES, e += PLANE_BLOCK) {
        uint64_t bits[3];
        memcpy(bits, codes, sizeof(bits));
        for (size_t i = 0; i < PLANE_BLOCK; ++i) {
            const int code = (int) (bits[0] >> i & 1) | (int) (bits[1] >> i & 1) << 1 | (int) (bits[2] >> i & 1) << 2;
            if (code < 7) {
                e[i] = table[code];
            } else if (escapes < end) {
                e[i] = *escapes++;
            } else {
                return nullptr;
            }
        }
    }
    return escapes;
}

void nibbles(const uint8_t * exponents, const uint8_t * blocks, size_t n_blocks, uint8_t * rows) {
    for (; n_blocks > 0; --n_blocks, blocks += NIBBLE_BLOCK_BYTES, rows += 2 * PLANE_BLOCK) {
        for (size_t i = 0; i < PLANE_BLOCK; ++i) {
            const size_t   at = nibble_place(i % 32);
            const uint32_t e  = exponents[blocks[at] >> (i < 32 ? 0 : 4) & 0xf];
            const uint32_t sm = blocks[32 + i / 32 * 32 + at];
            store16(rows + 2 * i, (sm & 0x80) << 8 | e << 7 | (sm & 0x7f));
        }
    }
}

} // namespace

const PlaneKernels & scalar_kernels() {
    static const PlaneKernels kernels = { merge_bf16, merge_f16, merge_f32, lookup, nibbles };
    return kernels;
}

} // namespace pyorch
