#include "codecs/bit_planes.h"

#include "codecs/plane_kernels.h"

#include <algorithm>
#include <cstring>

namespace pyorch {

Numbers numbers_of(const std::string & ggml_type) {
    return ggml_type == "bf16" ? Numbers::BF16 :
        ggml_type == "f16"     ? Numbers::F16 :
        ggml_type == "f32"     ? Numbers::F32 :
                                 Numbers::BYTES;
}

size_t number_bytes(Numbers type) { return type == Numbers::F32 ? 4 : type == Numbers::BYTES ? 1 : 2; }

static size_t sm_block_bytes(Numbers type) {
    switch (type) {
    case Numbers::BF16: return PLANE_BLOCK;
    case Numbers::F16: return PLANE_BLOCK + 3 * sizeof(uint64_t);
    case Numbers::F32: return 3 * PLANE_BLOCK;
    default: return 0;
    }
}

size_t sm_bytes(Numbers type, size_t n) { return n_blocks_of(n) * sm_block_bytes(type); }

size_t sm_offset(Numbers type, size_t first) { return first / PLANE_BLOCK * sm_block_bytes(type); }

size_t shard_numbers(size_t n, size_t n_shards) {
    return std::max<size_t>((n_blocks_of(n) + n_shards - 1) / n_shards, 1) * PLANE_BLOCK;
}

// Splits one block. REQUIRES: sm is zeros.
static void split_block(Numbers type, const uint8_t * raw, size_t n, uint8_t * e, uint8_t * sm) {
    for (size_t i = 0; i < n; ++i) {
        if (type == Numbers::F32) {
            uint32_t bits;
            memcpy(&bits, raw + 4 * i, 4);
            e[i]                    = (uint8_t) (bits >> 23);
            sm[i]                   = (uint8_t) bits;
            sm[PLANE_BLOCK + i]     = (uint8_t) (bits >> 8);
            sm[2 * PLANE_BLOCK + i] = (uint8_t) (bits >> 31 << 7 | (bits >> 16 & 0x7f));
            continue;
        }
        uint16_t bits;
        memcpy(&bits, raw + 2 * i, 2);
        if (type == Numbers::BF16) {
            e[i]  = (uint8_t) (bits >> 7);
            sm[i] = (uint8_t) (bits >> 15 << 7 | (bits & 0x7f));
        } else {
            e[i]  = bits >> 10 & 0x1f;
            sm[i] = (uint8_t) bits;
            for (int b = 0; b < 3; ++b) {
                const int bit = bits >> (b < 2 ? 8 + b : 15) & 1;
                sm[PLANE_BLOCK + 8 * b + i / 8] |= (uint8_t) (bit << i % 8);
            }
        }
    }
}

void split(Numbers type, const uint8_t * raw, size_t n, uint8_t * e, uint8_t * sm) {
    memset(sm, 0, sm_bytes(type, n));
    for (size_t first = 0; first < n; first += PLANE_BLOCK) {
        split_block(type, raw + first * number_bytes(type), std::min(PLANE_BLOCK, n - first), e + first,
            sm + sm_offset(type, first));
    }
}

void merge(Numbers type, const uint8_t * e, const uint8_t * sm, size_t n, uint8_t * raw, Simd simd) {
    const auto   kernel = plane_kernels(simd).merge(type);
    const size_t whole  = n / PLANE_BLOCK * PLANE_BLOCK;
    kernel(e, sm, n / PLANE_BLOCK, raw);
    if (whole < n) {
        uint8_t exponents[PLANE_BLOCK] = {};
        uint8_t block[4 * PLANE_BLOCK];
        memcpy(exponents, e + whole, n - whole);
        kernel(exponents, sm + sm_offset(type, whole), 1, block);
        memcpy(raw + whole * number_bytes(type), block, (n - whole) * number_bytes(type));
    }
}

bool has_simd(Simd simd) {
    switch (simd) {
    case Simd::SCALAR: return true;
#if defined(__aarch64__)
    case Simd::NEON: return true;
#elif defined(__x86_64__)
    case Simd::AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi");
    case Simd::AVX512:
        return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("bmi2");
#endif
    default: return false;
    }
}

Simd best_simd() {
    static const Simd best = [] {
        for (Simd simd : { Simd::AVX512, Simd::AVX2, Simd::NEON }) {
            if (has_simd(simd)) {
                return simd;
            }
        }
        return Simd::SCALAR;
    }();
    return best;
}

const PlaneKernels & plane_kernels(Simd simd) {
    switch (simd) {
#if defined(__aarch64__)
    case Simd::NEON: return neon_kernels();
#elif defined(__x86_64__)
    case Simd::AVX2: return avx2_kernels();
    case Simd::AVX512: return avx512_kernels();
#endif
    default: return scalar_kernels();
    }
}

} // namespace pyorch
