// How fast experts are put together again on one core, beside memcpy of as many bytes.
//
// Matrices lie in more memory than caches have. Each figure is the median of rounds that take turns.

#include "codecs/exponent_codecs.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>

using namespace pyorch;

namespace {

constexpr size_t N        = 1408 * 2048; // numbers of a matrix, as OLMoE's are
constexpr size_t N_COPIES = 8;
constexpr int    N_ROUNDS = 15;

using Bytes = std::vector<uint8_t>;

struct Task {
    std::string                 name;
    size_t                      stored_bytes; // of the exponents
    std::function<void(size_t)> run;          // of one copy
    std::vector<double>         seconds;
};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

std::string name_of(Simd simd) {
    return simd == Simd::AVX512 ? "AVX-512" : simd == Simd::AVX2 ? "AVX2" : simd == Simd::NEON ? "NEON" : "scalar";
}

void bench(Numbers type, const char * type_name) {
    const size_t                    bytes = N * number_bytes(type);
    std::mt19937                    rng{ 1 };
    std::normal_distribution<float> weights(0, 0.02f);
    std::vector<Bytes>              raw(N_COPIES), e(N_COPIES), sm(N_COPIES), to(N_COPIES);
    std::vector<Bytes>              table(N_COPIES), zstd(N_COPIES);
    for (size_t c = 0; c < N_COPIES; ++c) {
        raw[c].resize(bytes);
        to[c].resize(bytes);
        e[c].resize(N);
        sm[c].resize(sm_bytes(type, N));
        for (size_t i = 0; i < N; ++i) {
            const float weight = weights(rng);
            uint32_t    bits;
            memcpy(&bits, &weight, sizeof(bits));
            if (type == Numbers::F32) {
                memcpy(&raw[c][4 * i], &bits, 4);
            } else {
                const uint32_t exponent = (bits >> 23) - (type == Numbers::F16 ? 112 : 0); // as F16 has it
                const uint16_t half     = (uint16_t) (type == Numbers::BF16 ?
                        bits >> 16 :
                        bits >> 31 << 15 | std::min(exponent, 31u) << 10 | (bits >> 13 & 0x3ff));
                memcpy(&raw[c][2 * i], &half, 2);
            }
        }
        split(type, raw[c].data(), N, e[c].data(), sm[c].data());
        encode(PlaneCodec::TABLE, 0, e[c].data(), N, table[c]);
        encode(PlaneCodec::ZSTD, 1, e[c].data(), N, zstd[c]);
    }

    std::vector<Task> tasks;
    tasks.push_back({ "memcpy", 0, [&](size_t c) { memcpy(to[c].data(), raw[c].data(), bytes); }, {} });
    for (Simd simd : { Simd::SCALAR, Simd::NEON, Simd::AVX2, Simd::AVX512 }) {
        if (!has_simd(simd)) {
            continue;
        }
        tasks.push_back({ "merge, " + name_of(simd), 0,
            [&, simd](size_t c) { merge(type, e[c].data(), sm[c].data(), N, to[c].data(), simd); }, {} });
        tasks.push_back({ "table and merge, " + name_of(simd), table[0].size(),
            [&, simd](size_t c) {
                recover(type, PlaneCodec::TABLE, table[c].data(), table[c].size(), sm[c].data(), N, to[c].data(), simd);
            },
            {} });
    }
    tasks.push_back({ "zstd and merge", zstd[0].size(),
        [&](size_t c) {
            recover(type, PlaneCodec::ZSTD, zstd[c].data(), zstd[c].size(), sm[c].data(), N, to[c].data());
        },
        {} });
    tasks.push_back({ "split", 0, [&](size_t c) { split(type, raw[c].data(), N, e[c].data(), sm[c].data()); }, {} });
    Bytes encoded;
    tasks.push_back({ "table, encode", table[0].size(),
        [&](size_t c) { encode(PlaneCodec::TABLE, 0, e[c].data(), N, encoded); }, {} });
    tasks.push_back({ "zstd 1, encode", zstd[0].size(),
        [&](size_t c) { encode(PlaneCodec::ZSTD, 1, e[c].data(), N, encoded); }, {} });

    for (int round = 0; round <= N_ROUNDS; ++round) {
        for (Task & task : tasks) {
            const auto begin = std::chrono::steady_clock::now();
            for (size_t c = 0; c < N_COPIES; ++c) { // so each is cold when it comes again
                task.run(c);
            }
            const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
            if (round > 0) {
                task.seconds.push_back(seconds.count() / N_COPIES);
            }
        }
    }
    const double copying = median(tasks[0].seconds);
    printf("%s, %.1f MiB a matrix\n", type_name, (double) bytes / (1 << 20));
    for (const Task & task : tasks) {
        const double seconds = median(task.seconds);
        printf("  %-24s %6.2f GB/s of the matrix  %4.0f %% of memcpy", task.name.c_str(),
            (double) bytes / seconds / 1e9, 100 * copying / seconds);
        if (task.stored_bytes != 0) {
            printf("  %.3f of its size", (double) (task.stored_bytes + sm[0].size()) / (double) bytes);
        }
        printf("\n");
    }
}

} // namespace

int main() {
    bench(Numbers::BF16, "BF16");
    bench(Numbers::F16, "F16");
    bench(Numbers::F32, "F32");
    return 0;
}
