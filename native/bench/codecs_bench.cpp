// How fast experts are put together again and repacked on one core, beside memcpy of as many bytes; and how fast they
// are multiplied with a row as they are stored (nibble.h), beside plain ones.
//
// Matrices lie in more memory than caches have. Each figure is the median of rounds that take turns.

#include "base/cpu_backend.h"
#include "base/cpu_time.h"
#include "codecs/exponent_codecs.h"
#include "codecs/nibble.h"
#include "model/layout.h"

#include <algorithm>
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

void run(std::vector<Task> & tasks, size_t n_copies) {
    for (int round = 0; round <= N_ROUNDS; ++round) {
        for (Task & task : tasks) {
            const uint64_t begin = thread_cpu_ns(); // others may be at work
            for (size_t c = 0; c < n_copies; ++c) { // so each is cold when it comes again
                task.run(c);
            }
            if (round > 0) {
                task.seconds.push_back(1e-9 * (double) (thread_cpu_ns() - begin) / (double) n_copies);
            }
        }
    }
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

    run(tasks, N_COPIES);
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

// Of BF16 [n_out][n_in], 129 MiB of it, with one row and with several.
void bench_nibbles(size_t n_in, size_t n_out, size_t n_columns) {
    const size_t                    n_copies = (129u << 20) / (2 * n_in * n_out);
    const auto                      dot      = cpu_backend().type_traits(GGML_TYPE_BF16)->vec_dot;
    std::mt19937                    rng{ 1 };
    std::normal_distribution<float> weights(0, 0.02f);
    std::vector<ggml_bf16_t>        columns(n_columns * n_in);
    std::vector<Bytes>              raw(n_copies, Bytes(2 * n_in * n_out)), nibbles(n_copies);
    for (ggml_bf16_t & number : columns) {
        number = ggml_fp32_to_bf16(weights(rng));
    }
    for (size_t c = 0; c < n_copies; ++c) {
        for (size_t i = 0; i < n_in * n_out; ++i) {
            const ggml_bf16_t number = ggml_fp32_to_bf16(weights(rng));
            memcpy(&raw[c][2 * i], &number, sizeof(number));
        }
        encode_nibbles(raw[c].data(), n_in, n_out, nibbles[c]);
    }
    float      result;
    Bytes      decoded(2 * n_in * n_out);
    const auto multiply = [&](const uint8_t * rows, size_t n) {
        for (size_t column = 0; column < n_columns; ++column) {
            for (size_t row = 0; row < n; ++row) {
                dot((int) n_in, &result, 0, rows + 2 * n_in * row, 0, columns.data() + n_in * column, 0, 1);
            }
        }
    };
    std::vector<Task> tasks;
    tasks.push_back({ "plain", 0,
        [&](size_t c) {
            for (size_t row = 0; row < n_out; row += 16) {
                multiply(raw[c].data() + 2 * n_in * row, std::min<size_t>(16, n_out - row));
            }
        },
        {} });
    for (const size_t step : { (size_t) 1, (size_t) 16, n_out }) { // into the first cache, the second, memory
        tasks.push_back({ "nibble, " + std::to_string(step) + " rows at once", 0,
            [&, step](size_t c) {
                for (size_t row = 0; row < n_out; row += step) {
                    const size_t n = std::min(step, n_out - row);
                    decode_nibbles(nibbles[c].data(), n_in, n_out, row, n, decoded.data());
                    multiply(decoded.data(), n);
                }
            },
            {} });
    }
    run(tasks, n_copies);
    printf("%zu x %zu with %zu rows, nibble %.3f of its size\n", n_in, n_out, n_columns,
        (double) nibbles[0].size() / (double) raw[0].size());
    for (const Task & task : tasks) {
        std::vector<double> ratios;
        for (int round = 0; round < N_ROUNDS; ++round) {
            ratios.push_back(task.seconds[round] / tasks[0].seconds[round]);
        }
        std::sort(ratios.begin(), ratios.end());
        printf("  %-28s %7.2f ms a matrix  %.2f of plain (%.2f to %.2f)\n", task.name.c_str(),
            1e3 * median(task.seconds), ratios[N_ROUNDS / 2], ratios[2], ratios[N_ROUNDS - 3]);
    }
}

// Into the order of llama.cpp's kernels, by its own code and by the runtime, and copying, all of 96 MiB.
void bench_repacking(ggml_type type) {
    constexpr int64_t  n_in = 2048, n_out = 1024;
    const size_t       bytes    = ggml_row_size(type, n_in) * n_out;
    const size_t       n_copies = (96u << 20) / bytes;
    const ExpertTensor layout   = { "", "", ggml_type_name(type), 0, 0, bytes, n_in, n_out };
    if (!can_repack(layout)) {
        printf("%s stays plain\n", ggml_type_name(type));
        return;
    }
    ggml_tensor experts = {};
    experts.type        = type;
    experts.ne[0]       = n_in;
    experts.ne[1]       = n_out;
    experts.ne[2] = experts.ne[3] = 1;
    std::vector<Bytes> from(n_copies, Bytes(bytes, 1)), to(n_copies, Bytes(bytes));
    std::vector<Task>  tasks;
    tasks.push_back({ "memcpy", 0, [&](size_t c) { memcpy(to[c].data(), from[c].data(), bytes); }, {} });
    tasks.push_back({ "repacked by llama.cpp", 0,
        [&](size_t c) { cpu_backend().repack(&experts, n_out, to[c].data(), from[c].data()); }, {} });
    tasks.push_back(
        { "repacked", 0, [&](size_t c) { repack(layout, (const char *) from[c].data(), (char *) to[c].data()); }, {} });
    run(tasks, n_copies);
    const double copying = median(tasks[0].seconds);
    printf("%s\n", ggml_type_name(type));
    for (const Task & task : tasks) {
        const double seconds = median(task.seconds);
        printf("  %-24s %6.2f GB/s of the matrix  %4.0f %% of memcpy\n", task.name.c_str(),
            (double) bytes / seconds / 1e9, 100 * copying / seconds);
    }
}

} // namespace

int main() {
    for (const ggml_type type : { GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4, GGML_TYPE_Q4_K, GGML_TYPE_Q2_K }) {
        bench_repacking(type);
    }
    for (const size_t n_columns : { 1, 2, 33 }) {
        bench_nibbles(2048, 1408, n_columns);
    }
    bench_nibbles(1024, 2048, 1);
    bench(Numbers::BF16, "BF16");
    bench(Numbers::F16, "F16");
    bench(Numbers::F32, "F32");
    return 0;
}
