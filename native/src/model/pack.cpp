// Packs: expert by expert what a GGUF holds matrix by matrix. The format is in docs/packs.md.

#include "model/fatal.h"
#include "model/form.h"
#include "model/layout.h"
#include "model/model_map.h"

#include "ggml.h"
#include "gguf.h"

#include <cinttypes>
#include <cstdio>
#include <sys/stat.h>

namespace pyorch {
namespace {

constexpr const char * LAYOUTS = "experts.layouts"; // key: the layout_name() of every matrix of every layer

// A row of blk.N.index: one chunk of a matrix.
struct Chunk {
    int64_t  expert;
    int64_t  role;   // index into the layer's tensors
    int64_t  plane;  // which part of the matrix, for codecs that take it apart
    int64_t  codec;  // 0: stored as it is
    uint64_t offset; // from the start of blk.N.experts
    uint64_t stored; // bytes in the pack
    uint64_t raw;    // bytes of the matrix
    uint64_t checksum;
};

constexpr int64_t COLUMNS = sizeof(Chunk) / sizeof(int64_t);

struct Tensor {
    const ggml_tensor * shape;
    uint64_t            offset; // from the start of the file
    uint64_t            bytes;
};

// A pack being read.
class Pack {
public:
    explicit Pack(const std::string & path) : path(path) {
        check_readable(path);
        gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ &meta };
        gguf = gguf_init_from_file(path.c_str(), params);
        file = fopen(path.c_str(), "rb");
        if (!gguf || !file) {
            close();
            throw damaged("its metadata cannot be read");
        }
        struct stat st;
        bytes = fstat(fileno(file), &st) == 0 ? (uint64_t) st.st_size : 0;
    }

    ~Pack() { close(); }

    Pack(const Pack &) = delete;
    Pack & operator=(const Pack &) = delete;

    Failure damaged(const std::string & why) const {
        return { PYORCH_FORMAT, path + " is a damaged pack: " + why };
    }

    // An element of an array of strings, "" where there is none.
    std::string text(const char * key, size_t index) const {
        const int64_t id = gguf_find_key(gguf, key);
        const bool    is = id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_ARRAY &&
            gguf_get_arr_type(gguf, id) == GGUF_TYPE_STRING && index < gguf_get_arr_n(gguf, id);
        return is ? gguf_get_arr_str(gguf, id, index) : "";
    }

    Tensor tensor(const std::string & name) const {
        const int64_t id = gguf_find_tensor(gguf, name.c_str());
        if (id < 0) {
            throw damaged("it has no " + name);
        }
        const ggml_tensor * shape = ggml_get_tensor(meta, name.c_str());
        const uint64_t      begin = gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, id);
        const uint64_t      size  = ggml_nbytes(shape);
        if (begin + size > bytes) {
            throw damaged(format("it has %" PRIu64 " bytes, and %s ends at %" PRIu64, bytes, name.c_str(), begin + size));
        }
        return { shape, begin, size };
    }

    std::vector<Chunk> chunks(const Tensor & index, size_t n) const {
        std::vector<Chunk> all(n);
        if (fseeko(file, (off_t) index.offset, SEEK_SET) != 0 || fread(all.data(), sizeof(Chunk), n, file) != n) {
            throw Failure(PYORCH_IO, path + " cannot be read");
        }
        return all;
    }

    const std::string path;
    uint64_t          bytes = 0;

private:
    ggml_context * meta = nullptr;
    gguf_context * gguf = nullptr;
    FILE *         file = nullptr;

    void close() {
        if (file) {
            fclose(file);
        }
        gguf_free(gguf);
        ggml_free(meta);
    }
};

// Checks every number of an index: what is read by it lands in slots.
std::shared_ptr<PackedLayer> packed_layer(const Pack & pack, const MoeLayer & layer, int file) {
    const size_t      n_roles = layer.tensors.size();
    const std::string block   = format("blk.%d.", layer.il);
    const Tensor      data    = pack.tensor(block + "experts");
    const Tensor      index   = pack.tensor(block + "index");
    const size_t      n       = layer.n_expert * n_roles;
    const auto *      shape   = index.shape;
    if (shape->type != GGML_TYPE_I64 || shape->ne[0] != COLUMNS || ggml_nelements(shape) != (int64_t) n * COLUMNS) {
        throw pack.damaged(block + "index is not one of " + std::to_string(n) + " chunks");
    }
    if (data.shape->type != GGML_TYPE_I8 || data.offset % PAGE != 0) {
        throw pack.damaged(block + "experts does not begin at a page");
    }
    MoeLayer as_packed = layer;
    as_packed.pack = std::make_shared<PackedLayer>();
    auto packed = std::make_shared<PackedLayer>();
    packed->file = file;
    packed->offset.assign(layer.n_expert, UINT64_MAX);
    packed->checksum.resize(n);
    std::vector<bool> known(n);
    for (const Chunk & chunk : pack.chunks(index, n)) {
        if (chunk.expert < 0 || chunk.expert >= layer.n_expert || chunk.role < 0 || chunk.role >= (int64_t) n_roles) {
            throw pack.damaged(format("%sindex has expert %" PRId64 ", matrix %" PRId64, block.c_str(), chunk.expert,
                chunk.role));
        }
        const size_t   id     = chunk.expert * n_roles + chunk.role;
        const uint64_t within = block_offset(as_packed, (int) chunk.role, Form::FULL);
        const uint64_t record = chunk.offset - within;
        if (chunk.codec != 0 || chunk.plane != 0) {
            throw Failure(PYORCH_FORMAT, format("%s was written by a newer version: chunks of its layer %d have the codec %"
                PRId64 ", which this one does not know", pack.path.c_str(), layer.il, chunk.codec));
        }
        if (known[id] || chunk.raw != layer.tensors[chunk.role].stride || chunk.stored != chunk.raw || chunk.offset < within ||
            record % PAGE != 0 || record > data.bytes || data.bytes - record < record_bytes(as_packed) ||
            (packed->offset[chunk.expert] != UINT64_MAX && packed->offset[chunk.expert] != data.offset + record)) {
            throw pack.damaged(format("%sindex misplaces expert %" PRId64, block.c_str(), chunk.expert));
        }
        known[id] = true;
        packed->offset[chunk.expert] = data.offset + record;
        packed->checksum[id]         = chunk.checksum;
    }
    return packed;
}

} // namespace

void ModelMap::attach_pack(const std::string & path) {
    const FatalGuard guard;
    const Pack       pack(path);
    size_t           n_matrices = 0;
    std::vector<std::shared_ptr<const PackedLayer>> packed;
    for (const MoeLayer & layer : layers) {
        auto of_layer = packed_layer(pack, layer, n_shards);
        for (const ExpertTensor & tensor : layer.tensors) {
            const std::string layout = pack.text(LAYOUTS, n_matrices++);
            if (layout != PLAIN && layout != layout_name(tensor)) {
                throw Failure(PYORCH_FORMAT, format("%s holds %s in the layout \"%s\", which the kernels of this machine do not "
                    "compute with: make it again here", path.c_str(), tensor.name.c_str(), layout.c_str()));
            }
            of_layer->repacked.push_back(layout != PLAIN);
        }
        packed.push_back(of_layer);
    }
    files.resize(n_shards);
    files.push_back({ path, pack.bytes, pack.bytes });
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].pack = packed[i];
    }
}

} // namespace pyorch
