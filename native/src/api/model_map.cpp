#include "api/api.h"
#include "base/checksum.h"
#include "model/form.h"
#include "model/layout.h"
#include "model/layout_rates.h"

#include "llama-hparams.h"

#include <algorithm>

using namespace pyorch;

static_assert(
    MAX_LAYERS == LLAMA_MAX_LAYERS && MAX_EXPERTS == LLAMA_MAX_EXPERTS, "a model map takes what llama.cpp takes");

namespace {

const ExpertTensor & repackable(const ModelMap & map, int il, int role) {
    const auto & layer = map.layers[map.index_of(il)];
    if (role < 0 || (size_t) role >= layer.tensors.size()) {
        throw Failure(PYORCH_INVALID, format("layer %d has no matrix %d", il, role));
    }
    const auto & t = layer.tensors[role];
    if (!can_repack(t)) {
        throw Failure(PYORCH_INVALID, format("the layout of %s is plain: there is nothing to repack", t.name.c_str()));
    }
    return t;
}

} // namespace

extern "C" {

pyorch_status pyorch_model_map_open(const char * path, pyorch_model_map ** map) {
    return guarded([&] { *map = new pyorch_model_map{ ModelMap(path) }; });
}

void pyorch_model_map_free(pyorch_model_map * map) { delete map; }

pyorch_status pyorch_model_map_attach_pack(pyorch_model_map * map, const char * path) {
    return guarded([&] { map->map.attach_pack(path); });
}

pyorch_status pyorch_model_map_add_copy(pyorch_model_map * map, int32_t file, int32_t disk, const char * path) {
    return guarded([&] {
        auto & files = map->map.files;
        if (file < 0 || (size_t) file >= files.size() || disk < 1 || disk > PYORCH_MAX_COPIES) {
            throw Failure(PYORCH_INVALID,
                format("a model of %zu files has no file %d that copy %d is of", files.size(), file, disk));
        }
        auto & copies = files[file].copies;
        copies.resize(std::max(copies.size(), (size_t) disk));
        copies[disk - 1] = path;
    });
}

uint64_t pyorch_checksum(const void * data, size_t size) { return checksum(data, size); }

pyorch_status pyorch_model_map_get_info(const pyorch_model_map * map, pyorch_model_map_info * info) {
    return guarded([&] {
        const auto &          m   = map->map;
        pyorch_model_map_info out = {};
        copy_text(out.arch, m.arch);
        copy_text(out.name, m.name);
        out.n_files       = m.n_shards;
        out.n_layers      = m.n_layers;
        out.n_moe_layers  = (int32_t) m.layers.size();
        out.n_expert_used = m.n_expert_used;
        out.file_bytes    = m.file_bytes();
        out.expert_bytes  = m.expert_bytes();
        out.dense_bytes   = m.tensor_bytes - out.expert_bytes;
        out.slots_bytes   = m.slots_bytes();
        out.floor_bytes   = m.floor_bytes();
        out.slim          = m.slim;
        out.n_params      = m.n_params;
        *info             = out;
    });
}

pyorch_status pyorch_model_map_get_layer(const pyorch_model_map * map, int32_t index, pyorch_layer_info * info) {
    return guarded([&] {
        if (index < 0 || (size_t) index >= map->map.layers.size()) {
            throw Failure(PYORCH_INVALID,
                format("there are %zu layers with routed experts, not %d", map->map.layers.size(), index + 1));
        }
        const auto &      layer = map->map.layers[index];
        pyorch_layer_info out   = {};
        out.il                  = layer.il;
        out.n_expert            = layer.n_expert;
        out.n_expert_used       = layer.n_used;
        out.n_roles             = (int32_t) layer.tensors.size();
        out.expert_bytes        = layer.expert_bytes();
        out.slot_bytes          = layer.slot_bytes();
        for (size_t r = 0; r < layer.tensors.size(); ++r) {
            out.n_in[r] = layer.tensors[r].n_in;
            copy_text(out.role[r], layer.tensors[r].role);
            copy_text(out.type[r], layer.tensors[r].type);
            copy_text(out.layout[r], layout_name(layer.tensors[r]));
        }
        *info = out;
    });
}

pyorch_status pyorch_model_map_get_range(
    const pyorch_model_map * map, int32_t il, int32_t expert, int32_t role, pyorch_range * range) {
    return guarded([&] {
        const auto & layer = map->map.layers[map->map.index_of(il)];
        if (expert < 0 || expert >= layer.n_expert || role < 0 || (size_t) role >= layer.tensors.size()) {
            throw Failure(PYORCH_INVALID, format("layer %d has no matrix %d of expert %d", il, role, expert));
        }
        const auto & t = layer.tensors[role];
        if (map->map.slim && !layer.pack) {
            throw Failure(PYORCH_FORMAT, lacks_experts(map->map));
        }
        if (map->map.slim && (is_compressed(layer) || layer.pack->nibbles[role])) {
            throw Failure(PYORCH_FORMAT,
                format("%s holds layer %d compressed: no matrix of it lies there as it is",
                    map->map.files[layer.pack->file].path.c_str(), il));
        }
        if (layer.lacks(expert)) {
            throw Failure(PYORCH_FORMAT,
                format("%s has a share of the experts, without expert %d of layer %d",
                    map->map.files[layer.pack->file].path.c_str(), expert, il));
        }
        range->path = map->map.files[map->map.slim ? layer.pack->file : t.file].path.c_str();
        range->type = t.type.c_str();
        range->offset =
            map->map.slim ? layer.pack->offset[expert] + block_offset(layer, role) : t.offset + expert * t.stride;
        range->size = t.stride;
    });
}

pyorch_status pyorch_model_map_repack(
    const pyorch_model_map * map, int32_t il, int32_t role, void * matrix, uint64_t size) {
    return guarded([&] {
        const auto & t = repackable(map->map, il, role);
        if (size != t.stride) {
            throw Failure(PYORCH_INVALID,
                format("a matrix of %s has %llu bytes, not %llu", t.name.c_str(), (unsigned long long) t.stride,
                    (unsigned long long) size));
        }
        repack(t, (const char *) matrix, (char *) matrix);
    });
}

pyorch_status pyorch_measure_layouts(
    const pyorch_model_map * map, int32_t il, int32_t role, pyorch_layout_rates * rates) {
    return guarded([&] {
        const LayoutRates of = measure_layouts(repackable(map->map, il, role));
        *rates               = { of.repacking, { of.plain[0], of.plain[1] }, { of.repacked[0], of.repacked[1] },
            LayoutRates::N_INPUTS };
    });
}

uint64_t pyorch_model_map_dense_bytes(const pyorch_model_map * map, int32_t il) {
    uint64_t          bytes  = 0;
    const std::string prefix = format("blk.%d.", il);
    const auto &      all    = map->map.tensors;
    for (auto tensor = all.lower_bound(prefix); tensor != all.end(); ++tensor) {
        if (tensor->first.compare(0, prefix.size(), prefix) != 0) {
            break;
        }
        bytes += map->map.find_experts(tensor->first) ? 0 : tensor->second.bytes;
    }
    return bytes;
}

pyorch_status pyorch_model_map_get_tensor(const pyorch_model_map * map, const char * name, pyorch_range * range) {
    return guarded([&] {
        const auto found = map->map.tensors.find(name);
        if (found == map->map.tensors.end()) {
            throw Failure(PYORCH_INVALID, format("%s has no tensor %s", map->map.files[0].path.c_str(), name));
        }
        const TensorRange & t = found->second;
        *range                = { map->map.files[t.file].path.c_str(), t.type.c_str(), t.offset, t.bytes };
    });
}

void pyorch_model_map_get_value(const pyorch_model_map * map, const char * key, int32_t index, pyorch_value * value) {
    *value      = {};
    value->kind = map->map.get_int(key, index, value->integer) ? 'i' :
        map->map.get_float(key, value->number)                 ? 'f' :
        map->map.get_str(key, value->text)                     ? 's' :
                                                                 0;
}

} // extern "C"
