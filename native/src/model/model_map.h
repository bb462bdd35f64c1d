// Which tensors of a GGUF are routed experts, and where each expert's bytes lie.
//
// Nothing here touches weights: the map is read from metadata alone, shards included.

#pragma once

#include "base/status.h"
#include "codecs/exponent_codecs.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

struct gguf_context;

namespace pyorch {

inline constexpr uint64_t PAGE = 4096; // what direct reads align to

// To the next multiple of the unit.
constexpr uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Less than this is read through the page cache: the alignment of a direct read would cost more memory than it saves
// time.
inline constexpr uint64_t DIRECT_MIN_BYTES = 128 * 1024;

// One matrix of every expert of a layer: a tensor [n_in, n_out, n_expert].
struct ExpertTensor {
    std::string name;      // blk.3.ffn_up_exps.weight
    std::string role;      // up, gate, gate_up, down
    std::string type;      // ggml type
    int         file;      // index into ModelMap::files
    uint64_t    offset;    // of expert 0, from the start of the file
    uint64_t    stride;    // bytes of one expert
    int64_t     n_in  = 0; // numbers in a row
    int64_t     n_out = 0; // rows
};

// What of an expert lies together, in a file and in memory (ZipMoE section 3.1). A compressed record has two regions:
// the E-chunks, which are the exponents of its matrices compressed, and the SM-chunks, all the rest.
enum Part : uint8_t {
    PART_E,
    PART_SM,
    PART_MATRICES, // what kernels compute with
};

inline constexpr int N_STORED_PARTS = 2;
inline constexpr int N_PARTS        = 3;

// What a compressed record has of a matrix, or of a shard of it.
struct PackedChunk {
    int        plane; // 0: all of the matrix. 1 and up: shards of its exponents; the last one: signs and mantissas
    PlaneCodec codec;
    uint64_t   offset; // from the beginning of its region
    uint64_t   stored; // bytes in the pack
    uint64_t   raw;    // bytes of what it stands for
    uint64_t   checksum;
};

// Where a share has what it does not hold: the pack of one server of several, beside its slim model.
constexpr uint64_t NOWHERE = UINT64_MAX;

// Where a pack holds the experts of a layer: expert by expert, the matrices of one together in its record.
struct PackedLayer {
    int                   file;     // index into ModelMap::files
    std::vector<uint64_t> offset;   // of each expert's record, from the start of the file: whole pages; or NOWHERE
    std::vector<uint64_t> checksum; // of each matrix, [n_expert * matrices]; none of a compressed layer
    std::vector<bool>     repacked; // [matrices]: they are in the order that layout_name() names
    std::vector<bool>     nibbles;  // [matrices]: kernels get their rows by decode_nibbles()

    // Of a layer with anything but whole matrices that are stored as they are; else a record is laid out as a slot.
    bool                     compressed                  = false;
    std::vector<uint64_t>    part_offset[N_STORED_PARTS] = {}; // [n_expert] of each region, from the start of the file
    std::vector<uint64_t>    part_bytes[N_STORED_PARTS]  = {}; // [n_expert] to the end of its last chunk
    uint64_t                 part_slot[N_STORED_PARTS]   = {}; // memory of a region: see give_part_slots()
    std::vector<PackedChunk> chunks                      = {}; // by expert, role and plane
    std::vector<size_t>      first                       = {}; // [n_expert * matrices + 1] in chunks, of each matrix
};

struct MoeLayer {
    int                                il;
    int                                n_expert;
    int                                n_used;         // top-k of its router; 0: the file does not say it
    std::vector<ExpertTensor>          tensors;        // in the order in which the kernels need them
    std::shared_ptr<const PackedLayer> pack = nullptr; // null: only the model's own files have them

    uint64_t expert_bytes() const;
    uint64_t slot_bytes() const; // of one expert that kernels can compute with

    // Of a share of the experts: it is one of the others, which no file here has.
    bool lacks(int expert) const { return pack && !pack->offset.empty() && pack->offset[expert] == NOWHERE; }

    int first_there() const {
        int expert = 0;
        while (expert < n_expert - 1 && lacks(expert)) {
            ++expert;
        }
        return expert;
    }
};

// LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS of llama.cpp, which asserts them where it loads a model.
constexpr int MAX_LAYERS  = 512;
constexpr int MAX_EXPERTS = 1024;

struct MapFile {
    std::string path;
    uint64_t    bytes;
    uint64_t    span; // to the end of the last tensor; of a slim file, more than it has

    std::vector<std::string> copies = {}; // on other disks, with the same content
};

struct TensorRange {
    int         file; // index into ModelMap::files
    uint64_t    offset;
    uint64_t    bytes;
    std::string type; // ggml type
};

// Throws Failure where a file cannot be read or does not begin as a GGUF does.
void check_readable(const std::string & path);

// Which matrices a tensor holds.
struct ExpertPlace {
    int layer; // index into ModelMap::layers
    int role;  // index into its tensors
};

class ModelMap {
public:
    // Throws Failure: PYORCH_IO when a file cannot be opened, PYORCH_FORMAT when it is not a whole GGUF.
    explicit ModelMap(const std::string & path);

    // Experts are read from a pack (docs/reference/packs.md) from now on. REQUIRES: the pack belongs to this model.
    // Throws Failure and leaves the map unchanged: PYORCH_IO if the pack cannot be opened, PYORCH_FORMAT if it is
    // damaged, was written for other kernels, or does not hold exactly these experts.
    void attach_pack(const std::string & path);

    std::vector<MapFile>               files;            // the model's own, and a pack behind them
    int                                n_shards = 0;     // the model's own
    bool                               slim     = false; // its own file lacks the bytes of the experts: a pack has them
    std::vector<MoeLayer>              layers;           // by ascending il; only those with routed experts
    std::map<std::string, TensorRange> tensors;          // all of them
    std::string                        arch;
    std::string                        name;
    int                                n_layers      = 0;
    int                                n_expert_used = 0; // of the layer with the largest top-k
    uint64_t                           tensor_bytes  = 0;
    uint64_t                           n_params      = 0;

    std::vector<int> n_experts() const; // by layer

    uint64_t file_bytes() const; // the model's own
    uint64_t expert_bytes() const;
    uint64_t slots_bytes() const;
    uint64_t floor_bytes() const;

    // Stored parts of the largest compressed expert; 0 where there is none.
    uint64_t parts_bytes() const;

    // Of memory through which compressed experts come: how many there are at once at least, and at most.
    static constexpr int MIN_STAGED = 2;
    int                  max_staged() const;

    // What the regions of compressed records begin at: pages if one of them may be large enough to be read directly.
    uint64_t region_alignment() const;

    // Sets the top-k of each layer. Throws Failure if a layer has experts and its router uses none, or more.
    void read_top_k();

    // How many experts of a layer must fit into memory for it to be computed: twice those of a token, and one that is
    // being read.
    int floor_experts(const MoeLayer & layer) const;

    // Of the layers with experts, the first so many run for every token: all but those that only predict further ones.
    int n_decoded() const;

    // Into layers. Throws Failure where il has no routed experts.
    int index_of(int il) const;

    // Null for a tensor that is not of routed experts.
    const ExpertPlace * find_experts(const std::string & tensor) const;

    // Metadata of the first shard; false where the key is missing or of another kind.
    bool get_int(const std::string & key, int index, int64_t & value) const;
    bool get_float(const std::string & key, double & value) const;
    bool get_str(const std::string & key, const char *& value) const;

private:
    std::shared_ptr<gguf_context>      metadata;
    std::map<std::string, ExpertPlace> experts_by_name;

    std::shared_ptr<gguf_context> read_file(const std::string & path);
    int64_t                       checked_int(const char * name, int64_t low, int64_t high, bool even = false) const;
    void                          check_heads() const;
};

} // namespace pyorch
