#if defined(__aarch64__)

#include "codecs/plane_kernels.h"

#include <arm_neon.h>
#include <cstring>

namespace pyorch {
namespace {

constexpr size_t LANES     = 16;
constexpr size_t N_VECTORS = PLANE_BLOCK / LANES; // in a block

// Expands 16 bits to bytes: `value` or 0.
inline uint8x16_t bytes_of(const uint8_t * bits, uint8_t value) {
    static const uint8_t bit_of[8] = { 1, 2, 4, 8, 16, 32, 64, 128 };
    const uint8x16_t     spread    = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
    const uint8x16_t     bit       = vcombine_u8(vld1_u8(bit_of), vld1_u8(bit_of));
    return vandq_u8(vtstq_u8(spread, bit), vdupq_n_u8(value));
}

// Return the high and the low byte of numbers of 16 bits, from exponents and sign << 7 | mantissa.
inline uint8x16_t bf16_high(uint8x16_t e, uint8x16_t sm) {
    return vorrq_u8(vandq_u8(sm, vdupq_n_u8(0x80)), vshrq_n_u8(e, 1));
}

inline uint8x16_t bf16_low(uint8x16_t e, uint8x16_t sm) {
    return vorrq_u8(vandq_u8(sm, vdupq_n_u8(0x7f)), vshlq_n_u8(e, 7));
}

void merge_bf16(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += PLANE_BLOCK, raw += 2 * PLANE_BLOCK) {
        uint8x16_t block[N_VECTORS];
        for (size_t v = 0; v < N_VECTORS; ++v) {
            block[v] = vld1q_u8(sm + LANES * v);
        }
        for (size_t v = 0; v < N_VECTORS; ++v) {
            const uint8x16_t   exponents = vld1q_u8(e + LANES * v);
            const uint8x16x2_t numbers   = { { bf16_low(exponents, block[v]), bf16_high(exponents, block[v]) } };
            vst2q_u8(raw + 2 * LANES * v, numbers);
        }
    }
}

void merge_f16(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += PLANE_BLOCK + 24, raw += 2 * PLANE_BLOCK) {
        uint8x16_t low[N_VECTORS];
        uint8_t    bits[24];
        for (size_t v = 0; v < N_VECTORS; ++v) {
            low[v] = vld1q_u8(sm + LANES * v);
        }
        memcpy(bits, sm + PLANE_BLOCK, sizeof(bits));
        for (size_t v = 0; v < N_VECTORS; ++v) {
            const uint8x16_t   exponents = vshlq_n_u8(vandq_u8(vld1q_u8(e + LANES * v), vdupq_n_u8(0x1f)), 2);
            const uint8x16_t   mantissas = vorrq_u8(bytes_of(bits + 2 * v, 1), bytes_of(bits + 8 + 2 * v, 2));
            const uint8x16_t   high      = vorrq_u8(vorrq_u8(exponents, mantissas), bytes_of(bits + 16 + 2 * v, 0x80));
            const uint8x16x2_t numbers   = { { low[v], high } };
            vst2q_u8(raw + 2 * LANES * v, numbers);
        }
    }
}

void merge_f32(const uint8_t * e, const uint8_t * sm, size_t n_blocks, uint8_t * raw) {
    for (; n_blocks > 0; --n_blocks, e += PLANE_BLOCK, sm += 3 * PLANE_BLOCK, raw += 4 * PLANE_BLOCK) {
        uint8x16_t block[3 * N_VECTORS];
        for (size_t v = 0; v < 3 * N_VECTORS; ++v) {
            block[v] = vld1q_u8(sm + LANES * v);
        }
        for (size_t v = 0; v < N_VECTORS; ++v) {
            const uint8x16_t   exponents = vld1q_u8(e + LANES * v);
            const uint8x16_t   third     = block[2 * N_VECTORS + v];
            const uint8x16x4_t numbers   = { { block[v], block[N_VECTORS + v], bf16_low(exponents, third),
                bf16_high(exponents, third) } };
            vst4q_u8(raw + 4 * LANES * v, numbers);
        }
    }
}

const uint8_t * lookup(const uint8_t * table, const uint8_t * codes, size_t n_blocks, const uint8_t * escapes,
    const uint8_t * end, uint8_t * e) {
    const uint8x16_t exponents_of = vcombine_u8(vld1_u8(table), vdup_n_u8(0));
    for (; n_blocks > 0; --n_blocks, codes += CODE_BYTES, e += PLANE_BLOCK) {
        uint64_t bits[3];
        memcpy(bits, codes, sizeof(bits));
        for (size_t v = 0; v < N_VECTORS; ++v) {
            const uint8x16_t code = vorrq_u8(
                vorrq_u8(bytes_of(codes + 2 * v, 1), bytes_of(codes + 8 + 2 * v, 2)), bytes_of(codes + 16 + 2 * v, 4));
            vst1q_u8(e + LANES * v, vqtbl1q_u8(exponents_of, code));
        }
        uint64_t escaped = bits[0] & bits[1] & bits[2];
        if (end - escapes < __builtin_popcountll(escaped)) {
            return nullptr;
        }
        for (; escaped != 0; escaped &= escaped - 1) {
            e[__builtin_ctzll(escaped)] = *escapes++;
        }
    }
    return escapes;
}

void nibbles(const uint8_t * exponents, const uint8_t * blocks, size_t n_blocks, uint8_t * rows) {
    const uint8x16_t e = vld1q_u8(exponents);
    for (; n_blocks > 0; --n_blocks, blocks += NIBBLE_BLOCK_BYTES, rows += 2 * PLANE_BLOCK) {
        for (size_t v = 0; v < N_VECTORS; ++v) { // vector v % 2 has the codes of v
            const uint8x16_t both = vld1q_u8(blocks + LANES * (v % 2));
            const uint8x16_t code = v < 2 ? vandq_u8(both, vdupq_n_u8(0xf)) : vshrq_n_u8(both, 4);
            const uint8x16_t sm   = vld1q_u8(blocks + 32 + LANES * v);
            const uint8x16_t low  = bf16_low(vqtbl1q_u8(e, code), sm);
            const uint8x16_t high = bf16_high(vqtbl1q_u8(e, code), sm);
            uint8_t *        to   = rows + 64 * (v / 2) + 16 * (v % 2);
            vst1q_u8(to, vzip1q_u8(low, high));
            vst1q_u8(to + 32, vzip2q_u8(low, high));
        }
    }
}

} // namespace

const PlaneKernels & neon_kernels() {
    static const PlaneKernels kernels = { merge_bf16, merge_f16, merge_f32, lookup, nibbles };
    return kernels;
}

} // namespace pyorch

#endif
