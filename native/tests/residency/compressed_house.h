// A table over a compressed pack of a model of two layers, whose reads and decodes are done by whoever asks: nothing
// happens beside a test. The model and its pack are written when they are first asked for.

#pragma once

#include "banks/host_bank.h"
#include "check.h"
#include "compressed_pack.h"
#include "residency/table.h"
#include "synthetic.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>

namespace pyorch {

constexpr int N_LAYERS = 2;
constexpr int N_EXPERT = 10;

// Weights are numbers around zero, as those of a model are: a few exponents are most of them.
inline void write_model(const std::string & file, int n_expert, int n_used, int n_rows) {
    ggml_init_params params = { 64u << 20, nullptr, false };
    ggml_context *   ctx    = ggml_init(params);
    gguf_context *   gguf   = gguf_init_empty();
    gguf_set_val_str(gguf, "general.architecture", "forms");
    gguf_set_val_u32(gguf, "forms.block_count", N_LAYERS);
    gguf_set_val_u32(gguf, "forms.expert_used_count", n_used);
    std::mt19937 rng(1);
    for (int l = 0; l < N_LAYERS; ++l) {
        for (const char * role : { "gate", "up", "down" }) {
            ggml_tensor * t = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 64, n_rows, n_expert);
            ggml_format_name(t, "blk.%d.ffn_%s_exps.weight", l, role);
            for (int64_t i = 0; i < ggml_nelements(t); ++i) {
                ((float *) t->data)[i] = (float) ((int) (rng() % 2001) - 1000) / 1000;
            }
            gguf_add_tensor(gguf, t);
        }
    }
    CHECK(gguf_write_to_file(gguf, file.c_str(), false));
    gguf_free(gguf);
    ggml_free(ctx);
}

inline ModelMap compressed_map() {
    static const bool written = (write_model(path, N_EXPERT, 2, 600), true);
    CHECK(written);
    ModelMap map(path);
    CHECK(compress(map, path + ".pack"));
    return map;
}

inline std::vector<int> experts(int n) {
    std::vector<int> ids(n);
    std::iota(ids.begin(), ids.end(), 0);
    return ids;
}

// Changes a byte of a region of an expert.
inline void damage(const ModelMap & map, int layer, int expert, Part part) {
    const PackedLayer & pack = *map.layers[layer].pack;
    const auto          at   = (std::streamoff) (pack.part_offset[part][expert] + pack.part_bytes[part][expert] / 2);
    std::fstream        file(path + ".pack", std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const int byte = file.get();
    file.seekp(at);
    CHECK(file.put((char) ~byte));
}

inline std::vector<char> from_model(const ModelMap & map, int layer, int expert, int role) {
    const ExpertTensor & t = map.layers[layer].tensors[role];
    std::vector<char>    bytes(t.stride);
    std::ifstream        model(map.files[t.file].path, std::ios::binary);
    model.seekg((std::streamoff) (t.offset + expert * t.stride));
    CHECK(model.read(bytes.data(), (std::streamsize) bytes.size()));
    return bytes;
}

struct House {
    Table       table;
    LocalReader reader;
    Owner       owner = { &owner };

    // A budget of so many full experts beside what the smallest one has.
    House(const ModelMap & map, int more, const PoolShares & shares, const Codec & codec = plain_codec(),
        pyorch_recovery recovery = PYORCH_RECOVERY_KERNELS) :
            table(map, std::make_unique<HostBank>(map, map.floor_bytes() + more * map.layers[0].slot_bytes()),
                open_files(map, true), codec, config(recovery)),
            reader(table.loader()) {
        table.set_pools(shares);
    }

    static pyorch_config config(pyorch_recovery recovery) {
        pyorch_config config = {};
        config.recovery      = recovery;
        return config;
    }

    void acquire(int layer, const std::vector<int> & experts, int n_tokens = 1, const std::vector<int> & rows = {}) {
        table.acquire(owner, layer, { experts, experts, n_tokens, false, true, false, true, rows });
    }

    // Each matrix of them is that of the model. False: one of them failed.
    bool check(int layer, const std::vector<int> & experts) {
        for (int role = 0; role < 3; ++role) {
            for (int id : experts) {
                const char * matrix = nullptr;
                while (!(matrix = table.address(owner, layer, id, role, false)) && reader.read_one()) {
                }
                const std::vector<char> expected = from_model(table.map, layer, id, role);
                CHECK(matrix && memcmp(matrix, expected.data(), expected.size()) == 0);
            }
        }
        reader.read_all();
        const pyorch_stats now = stats();
        CHECK(now.used_bytes <= now.budget_bytes && now.peak_bytes <= now.budget_bytes);
        CHECK(now.resident_bytes + now.stored_bytes <= now.used_bytes);
        return table.release(owner);
    }

    bool use(int layer, const std::vector<int> & experts, int n_tokens = 1) {
        acquire(layer, experts, n_tokens);
        return check(layer, experts);
    }

    pyorch_stats stats() {
        pyorch_stats now = {};
        table.add_stats(-1, now);
        return now;
    }

    uint64_t in_part() {
        const pyorch_stats now = stats();
        return now.compressed_hits + now.sm_hits + now.e_hits;
    }
};

} // namespace pyorch
