// A compressed pack of a model of F32 experts: in a map, for programs that look at the residency table alone.

#pragma once

#include "base/checksum.h"
#include "codecs/exponent_codecs.h"
#include "model/form.h"

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace pyorch {

// Writes the experts of the map to path, and has them come from there: exponents in two shards, coded by tables where
// that makes them smaller. The last matrix of each second layer is stored whole. False if a file cannot be used.
inline bool compress(ModelMap & map, const std::string & path) {
    std::ofstream file(path, std::ios::binary);
    uint64_t      end   = 0;
    const auto    write = [&](const std::vector<uint8_t> & bytes) {
        file.write((const char *) bytes.data(), (std::streamsize) bytes.size());
        end += bytes.size();
    };
    std::vector<std::shared_ptr<PackedLayer>> packed;
    for (size_t l = 0; l < map.layers.size(); ++l) {
        const MoeLayer & layer = map.layers[l];
        auto             pack  = std::make_shared<PackedLayer>();
        pack->file             = map.n_shards;
        pack->compressed       = true;
        pack->repacked.assign(layer.tensors.size(), false);
        pack->nibbles.assign(layer.tensors.size(), false);
        pack->first = { 0 };
        for (int expert = 0; expert < layer.n_expert; ++expert) {
            std::vector<uint8_t> regions[N_STORED_PARTS];
            const auto           add = [&](Part part, int plane, PlaneCodec codec, const std::vector<uint8_t> & stored,
                                           size_t raw) {
                auto & region = regions[part];
                region.resize((region.size() + 63) / 64 * 64);
                pack->chunks.push_back({ plane, codec, region.size(), stored.size(), raw,
                    checksum((const char *) stored.data(), stored.size()) });
                region.insert(region.end(), stored.begin(), stored.end());
            };
            for (size_t role = 0; role < layer.tensors.size(); ++role) {
                const ExpertTensor & t = layer.tensors[role];
                std::vector<uint8_t> raw(t.stride);
                std::ifstream        model(map.files[t.file].path, std::ios::binary);
                model.seekg((std::streamoff) (t.offset + expert * t.stride));
                if (!model.read((char *) raw.data(), (std::streamsize) raw.size())) {
                    return false;
                }
                if (l % 2 == 1 && role + 1 == layer.tensors.size()) {
                    add(PART_SM, 0, PlaneCodec::STORED, raw, raw.size());
                    pack->first.push_back(pack->chunks.size());
                    continue;
                }
                const size_t         n = t.stride / sizeof(float);
                std::vector<uint8_t> e(n), sm(sm_bytes(Numbers::F32, n)), stored;
                split(Numbers::F32, raw.data(), n, e.data(), sm.data());
                const size_t each  = shard_numbers(n, 2);
                int          plane = 0;
                for (size_t from = 0; from < n; from += each) {
                    const std::vector<uint8_t> shard(e.begin() + from, e.begin() + std::min(n, from + each));
                    if (encode(PlaneCodec::TABLE, 0, shard.data(), shard.size(), stored)) {
                        add(PART_E, ++plane, PlaneCodec::TABLE, stored, shard.size());
                    } else {
                        add(PART_E, ++plane, PlaneCodec::STORED, shard, shard.size());
                    }
                }
                add(PART_SM, ++plane, PlaneCodec::STORED, sm, sm.size());
                pack->first.push_back(pack->chunks.size());
            }
            for (Part part : { PART_E, PART_SM }) {
                pack->part_offset[part].push_back(end);
                pack->part_bytes[part].push_back(regions[part].size());
                regions[part].resize((regions[part].size() + PAGE - 1) / PAGE * PAGE);
                write(regions[part]);
            }
        }
        pack->offset = pack->part_offset[PART_E];
        packed.push_back(pack);
    }
    give_part_slots(map.layers, packed);
    map.files.push_back({ path, end, end });
    for (size_t l = 0; l < map.layers.size(); ++l) {
        map.layers[l].pack = packed[l];
    }
    file.close();
    return (bool) file;
}

} // namespace pyorch
