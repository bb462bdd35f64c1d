// Reads packs, which store matrices expert by expert. The format is in docs/reference/packs.md.

#include "codecs/nibble.h"
#include "model/fatal.h"
#include "model/form.h"
#include "model/layout.h"
#include "model/model_map.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <sys/stat.h>
#include <tuple>

namespace pyorch {
namespace {

constexpr const char * LAYOUTS = "experts.layouts"; // key: the layout_name() of every matrix of every layer

// A row of blk.N.index: one chunk of a matrix.
struct Chunk {
    int64_t  expert;
    int64_t  role;   // index into the layer's tensors
    int64_t  plane;  // 0: the whole matrix; 1 to K: shards of its exponents; K + 1: signs and mantissas
    int64_t  codec;  // PlaneCodec
    uint64_t offset; // from the start of blk.N.experts
    uint64_t stored; // bytes in the pack
    uint64_t raw;    // bytes of the matrix, or of the plane
    uint64_t checksum;
};

constexpr int64_t MAX_SHARDS = 64; // of the exponents of a matrix

constexpr uint64_t CHUNK_ALIGNMENT = 64; // of the chunks of a record; chunks of exponents have none

constexpr int64_t COLUMNS = sizeof(Chunk) / sizeof(int64_t);

struct Tensor {
    const ggml_tensor * shape;
    uint64_t            offset; // from the start of the file
    uint64_t            bytes;
};

// A pack as a file.
class Pack {
public:
    explicit Pack(const std::string & path) : path(path), file(nullptr, fclose) {
        check_readable(path);
        ggml_context *   tensors = nullptr;
        gguf_init_params params  = { /*.no_alloc =*/true, /*.ctx =*/&tensors };
        gguf.reset(gguf_init_from_file(path.c_str(), params));
        meta.reset(tensors);
        file.reset(fopen(path.c_str(), "rb"));
        if (!gguf || !file) {
            throw damaged("its metadata cannot be read");
        }
        struct stat st;
        bytes = fstat(fileno(file.get()), &st) == 0 ? (uint64_t) st.st_size : 0;
    }

    Failure damaged(const std::string & why) const { return { PYORCH_FORMAT, path + " is a damaged pack: " + why }; }

    // Returns an element of an array of strings, "" if it is missing.
    std::string text(const char * key, size_t index) const {
        const int64_t id = gguf_find_key(gguf.get(), key);
        const bool    is = id >= 0 && gguf_get_kv_type(gguf.get(), id) == GGUF_TYPE_ARRAY &&
            gguf_get_arr_type(gguf.get(), id) == GGUF_TYPE_STRING && index < gguf_get_arr_n(gguf.get(), id);
        return is ? gguf_get_arr_str(gguf.get(), id, index) : "";
    }

    Tensor tensor(const std::string & name) const {
        const int64_t id = gguf_find_tensor(gguf.get(), name.c_str());
        if (id < 0) {
            throw damaged("it has no " + name);
        }
        const ggml_tensor * shape = ggml_get_tensor(meta.get(), name.c_str());
        const uint64_t      begin = gguf_get_data_offset(gguf.get()) + gguf_get_tensor_offset(gguf.get(), id);
        const uint64_t      size  = ggml_nbytes(shape);
        if (begin + size > bytes) {
            throw damaged(
                format("it has %" PRIu64 " bytes, and %s ends at %" PRIu64, bytes, name.c_str(), begin + size));
        }
        return { shape, begin, size };
    }

    std::vector<Chunk> chunks(const Tensor & index, size_t n) const {
        std::vector<Chunk> all(n);
        if (fseeko(file.get(), (off_t) index.offset, SEEK_SET) != 0 ||
            fread(all.data(), sizeof(Chunk), n, file.get()) != n) {
            throw Failure(PYORCH_IO, path + " cannot be read");
        }
        return all;
    }

    const std::string path;
    uint64_t          bytes = 0;

private:
    ggml_context_ptr                       meta;
    gguf_context_ptr                       gguf;
    std::unique_ptr<FILE, int (*)(FILE *)> file;
};

// Reads and checks a layer's index.
class IndexReader {
public:
    IndexReader(const Pack & pack, const ModelMap & map, const MoeLayer & layer) :
            pack(pack), layer(layer), region_alignment(map.region_alignment()), block(format("blk.%d.", layer.il)),
            data(pack.tensor(block + "experts")), as_packed(layer) {
        as_packed.pack = packed;
    }

    // Checks every number, because reads with these numbers go to memory of these sizes.
    std::shared_ptr<PackedLayer> read(int file) {
        if (data.shape->type != GGML_TYPE_I8 || data.offset % PAGE != 0) {
            throw pack.damaged(block + "experts does not begin at a page");
        }
        const std::vector<Chunk> rows = read_rows();
        packed->file                  = file;
        packed->compressed = std::any_of(rows.begin(), rows.end(), [](const Chunk & row) { return !is_slot(row); });
        read_matrices(rows);
        for (int expert = 0; expert < layer.n_expert; ++expert) {
            if (packed->compressed) {
                add_compressed(expert, &rows[(size_t) expert * first_chunk.back()]);
            } else {
                add_plain(expert, &rows[(size_t) expert * first_chunk.back()]);
            }
        }
        check_overlaps();
        return packed;
    }

private:
    struct Span {
        uint64_t begin, end;
        int      expert;
    };

    const Pack &                       pack;
    const MoeLayer &                   layer;
    const uint64_t                     region_alignment;
    const std::string                  block;
    const Tensor                       data;
    std::vector<int>                   n_shards;    // of the exponents of each matrix; 0: it is whole
    std::vector<int>                   first_chunk; // [matrices + 1]
    std::vector<Span>                  spans;       // of all records
    const std::shared_ptr<PackedLayer> packed = std::make_shared<PackedLayer>();
    MoeLayer                           as_packed; // with the facts that were read so far

    // Returns whether the chunk is a whole matrix in the form for kernels.
    static bool is_slot(const Chunk & row) {
        return row.plane == 0 && (row.codec == (int64_t) PlaneCodec::STORED || has_nibbles(row));
    }

    static bool has_nibbles(const Chunk & row) { return row.codec == (int64_t) PlaneCodec::NIBBLE; }

    // Returns the rows by expert, matrix and plane.
    std::vector<Chunk> read_rows() const {
        const size_t n_roles = layer.tensors.size();
        const Tensor index   = pack.tensor(block + "index");
        const auto * shape   = index.shape;
        const size_t n       = shape->ne[1];
        const size_t n_most  = layer.n_expert * n_roles * (MAX_SHARDS + 1);
        if (shape->type != GGML_TYPE_I64 || shape->ne[0] != COLUMNS || ggml_nelements(shape) != (int64_t) n * COLUMNS ||
            n < layer.n_expert * n_roles || n > n_most || n % layer.n_expert != 0) {
            throw pack.damaged(
                format("%sindex is not one of %d experts with %zu matrices", block.c_str(), layer.n_expert, n_roles));
        }
        std::vector<Chunk> rows = pack.chunks(index, n);
        for (const Chunk & row : rows) {
            if (row.expert < 0 || row.expert >= layer.n_expert || row.role < 0 || row.role >= (int64_t) n_roles) {
                throw pack.damaged(
                    format("%sindex has expert %" PRId64 ", matrix %" PRId64, block.c_str(), row.expert, row.role));
            }
            if (row.codec == FORMER_LZ4) {
                throw Failure(PYORCH_FORMAT,
                    pack.path + " is compressed with lz4, which is no longer read: make it again with `pyorch pack`");
            }
            if (row.codec < 0 || row.codec >= N_PLANE_CODECS || row.plane < 0 || row.plane > MAX_SHARDS + 1) {
                throw Failure(PYORCH_FORMAT,
                    format("%s was written by a newer version: chunks of its layer %d have the codec %" PRId64
                           " and the plane %" PRId64 ", which this one does not know",
                        pack.path.c_str(), layer.il, row.codec, row.plane));
            }
        }
        std::sort(rows.begin(), rows.end(), [](const Chunk & a, const Chunk & b) {
            return std::tie(a.expert, a.role, a.plane) < std::tie(b.expert, b.role, b.plane);
        });
        return rows;
    }

    // Takes the division into chunks from the first expert; it is the same for all.
    void read_matrices(const std::vector<Chunk> & rows) {
        const int n_chunks = (int) (rows.size() / layer.n_expert);
        int       row      = 0;
        for (int role = 0; role < (int) layer.tensors.size(); ++role) {
            const auto & tensor = layer.tensors[role];
            first_chunk.push_back(row);
            while (row < n_chunks && rows[row].expert == 0 && rows[row].role == role) {
                ++row;
            }
            const int n = row - first_chunk.back();
            n_shards.push_back(n - 1); // a whole matrix has one chunk, a divided one at least two
            packed->nibbles.push_back(n == 1 && has_nibbles(rows[first_chunk.back()]));
            if (n == 0 || (packed->nibbles.back() && (packed->compressed || !makes_nibbles(tensor))) ||
                (n > 1 && (numbers_of(tensor.type) == Numbers::BYTES || !makes_shards(tensor, n - 1)))) {
                throw pack.damaged(format("%sindex has %d chunks of %s", block.c_str(), n, tensor.name.c_str()));
            }
        }
        first_chunk.push_back(row);
        if (row != n_chunks) {
            throw misplaced(0);
        }
    }

    // REQUIRES: the row is of this expert if the index is whole.
    void check_chunk(int expert, int role, int i, const Chunk & row) const {
        const uint64_t raw = raw_bytes(role, i);
        if (has_nibbles(row) != packed->nibbles[role] ||
            (has_nibbles(row) && row.stored != matrix_bytes(as_packed, role))) {
            throw misplaced(expert);
        }
        if (row.expert != expert || row.role != role || row.plane != (n_shards[role] == 0 ? 0 : i + 1) ||
            row.raw != raw || row.stored == 0 || (row.codec == 0 ? row.stored != raw : row.stored >= raw) ||
            (row.codec != 0 && n_shards[role] > 0 && i == n_shards[role]) || // signs and mantissas are not encoded
            (row.offset != NOWHERE && (row.offset > data.bytes || row.stored > data.bytes - row.offset))) {
            throw misplaced(expert);
        }
    }

    // Adds a record with the layout of a slot.
    void add_plain(int expert, const Chunk * rows) {
        const uint64_t record = rows[0].offset;
        for (int role = 0; role < (int) layer.tensors.size(); ++role) {
            check_chunk(expert, role, 0, rows[role]);
            if (rows[role].offset != (record == NOWHERE ? NOWHERE : record + block_offset(as_packed, role))) {
                throw misplaced(expert);
            }
            packed->checksum.push_back(rows[role].checksum);
        }
        if (record == NOWHERE) {
            packed->offset.push_back(NOWHERE);
            return;
        }
        add_span(expert, record, record_bytes(as_packed), PAGE);
        packed->offset.push_back(data.offset + record);
    }

    // Adds a compressed record. A region has gaps only for alignment, so its chunks do not overlap.
    void add_compressed(int expert, const Chunk * rows) {
        uint64_t begin[N_STORED_PARTS] = { UINT64_MAX, UINT64_MAX };
        uint64_t end[N_STORED_PARTS]   = {};
        for (int role = 0; role < (int) layer.tensors.size(); ++role) {
            packed->first.push_back(packed->chunks.size());
            for (int i = 0; i <= n_shards[role]; ++i) {
                const Part    part = i < n_shards[role] ? PART_E : PART_SM;
                const Chunk & row  = rows[first_chunk[role] + i];
                check_chunk(expert, role, i, row);
                const uint64_t offset = part == PART_E ? end[part] : round_up(end[part], CHUNK_ALIGNMENT);
                begin[part]           = begin[part] == UINT64_MAX ? row.offset : begin[part];
                end[part]             = offset + row.stored;
                if (row.offset == NOWHERE || row.offset < begin[part] || row.offset - begin[part] != offset) {
                    throw misplaced(expert);
                }
                packed->chunks.push_back(
                    { (int) row.plane, (PlaneCodec) row.codec, offset, row.stored, row.raw, row.checksum });
            }
        }
        if (expert == layer.n_expert - 1) {
            packed->first.push_back(packed->chunks.size());
        }
        begin[PART_E] = begin[PART_E] == UINT64_MAX ? begin[PART_SM] : begin[PART_E]; // whole matrices lack it
        for (const Part part : { PART_E, PART_SM }) {
            add_span(expert, begin[part], end[part], region_alignment);
            packed->part_offset[part].push_back(data.offset + begin[part]);
            packed->part_bytes[part].push_back(end[part]);
        }
    }

    // Adds a range of the data that is read at once, in whole units.
    void add_span(int expert, uint64_t begin, uint64_t bytes, uint64_t unit) {
        if (begin % unit != 0 || begin > data.bytes || round_up(bytes, unit) > data.bytes - begin) {
            throw misplaced(expert);
        }
        spans.push_back({ begin, begin + bytes, expert });
    }

    void check_overlaps() {
        std::sort(spans.begin(), spans.end(),
            [](const Span & a, const Span & b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
        for (size_t i = 1; i < spans.size(); ++i) {
            if (spans[i].begin < spans[i - 1].end) {
                throw misplaced(spans[i].expert);
            }
        }
    }

    uint64_t raw_bytes(int role, int i) const {
        const auto & tensor = layer.tensors[role];
        if (n_shards[role] == 0) {
            return tensor.stride;
        }
        const uint64_t n    = n_numbers(tensor);
        const uint64_t each = shard_numbers(n, n_shards[role]);
        return i == n_shards[role] ? sm_bytes(numbers_of(tensor.type), n) : std::min(each, n - i * each);
    }

    static uint64_t n_numbers(const ExpertTensor & tensor) {
        return tensor.stride / number_bytes(numbers_of(tensor.type));
    }

    static bool makes_nibbles(const ExpertTensor & tensor) {
        return pyorch::has_nibbles(numbers_of(tensor.type), tensor.n_in) &&
            tensor.stride == 2 * (uint64_t) (tensor.n_in * tensor.n_out);
    }

    // Returns whether dividing into this many shards makes exactly this many.
    static bool makes_shards(const ExpertTensor & tensor, uint64_t n_shards) {
        const uint64_t n    = n_numbers(tensor);
        const uint64_t each = shard_numbers(n, n_shards);
        return (n + each - 1) / each == n_shards;
    }

    Failure misplaced(int expert) const {
        return pack.damaged(format("%sindex misplaces expert %d", block.c_str(), expert));
    }
};

} // namespace

uint64_t ModelMap::region_alignment() const {
    uint64_t largest = 0;
    for (const auto & layer : layers) {
        largest = std::max(largest, layer.expert_bytes());
    }
    return largest >= DIRECT_MIN_BYTES - 2 * PAGE ? PAGE : CHUNK_ALIGNMENT;
}

void ModelMap::attach_pack(const std::string & path) {
    const FatalGuard                          guard;
    const Pack                                pack(path);
    size_t                                    n_matrices = 0;
    std::vector<std::shared_ptr<PackedLayer>> packed;
    for (const MoeLayer & layer : layers) {
        auto of_layer = IndexReader(pack, *this, layer).read(n_shards);
        for (const ExpertTensor & tensor : layer.tensors) {
            const std::string layout = pack.text(LAYOUTS, n_matrices++);
            const size_t      role   = of_layer->repacked.size();
            if (layout != PLAIN && (layout != layout_name(tensor) || of_layer->nibbles[role])) {
                throw Failure(PYORCH_FORMAT,
                    format("%s holds %s in the layout \"%s\", which the kernels of this machine do not "
                           "compute with: make it again here",
                        path.c_str(), tensor.name.c_str(), layout.c_str()));
            }
            of_layer->repacked.push_back(layout != PLAIN);
        }
        if (!slim && std::count(of_layer->offset.begin(), of_layer->offset.end(), NOWHERE) > 0) {
            throw Failure(PYORCH_FORMAT, path + " lacks experts, and belongs beside the slim model of a share");
        }
        packed.push_back(of_layer);
    }
    give_part_slots(layers, packed);
    files.resize(n_shards);
    files.push_back({ path, pack.bytes, pack.bytes });
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].pack = packed[i];
    }
}

} // namespace pyorch
