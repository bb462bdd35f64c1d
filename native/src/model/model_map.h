// Finds the routed experts among the tensors of a GGUF, and the place of each expert's bytes.
//
// The map reads only metadata, of all shards, and no weights.

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

inline constexpr uint64_t PAGE = 4096; // the alignment of direct reads

// Rounds up to a multiple of the unit.
constexpr uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Smaller ranges are read through the page cache: the alignment of a direct read would cost more memory than it saves
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

// The parts of an expert that are contiguous in a file and in memory (ZipMoE section 3.1). A compressed record has two
// regions: the E-chunks, which are the compressed exponents of its matrices, and the SM-chunks, which are the rest.
enum Part : uint8_t {
    PART_E,
    PART_SM,
    PART_MATRICES, // for kernels
};

inline constexpr int N_STORED_PARTS = 2;
inline constexpr int N_PARTS        = 3;

// A chunk of a matrix in a compressed record.
struct PackedChunk {
    int        plane; // 0: the whole matrix. 1 and up: shards of its exponents; the last one: signs and mantissas
    PlaneCodec codec;
    uint64_t   offset; // from the start of its region
    uint64_t   stored; // bytes in the pack
    uint64_t   raw;    // bytes after decoding
    uint64_t   checksum;
};

// The offset of an expert that a share lacks. A share is the pack of one of several servers, with its slim model.
constexpr uint64_t NOWHERE = UINT64_MAX;

// The places of a layer's experts in a pack: each expert has a record with all its matrices.
struct PackedLayer {
    int                   file;     // index into ModelMap::files
    std::vector<uint64_t> offset;   // of each expert's record, from the start of the file: whole pages; or NOWHERE
    std::vector<uint64_t> checksum; // of each matrix, [n_expert * matrices]; none of a compressed layer
    std::vector<bool>     repacked; // [matrices]: they are in the order that layout_name() names
    std::vector<bool>     nibbles;  // [matrices]: kernels get their rows by decode_nibbles()

    // True if some matrix is compressed or divided. Otherwise a record has the layout of a slot.
    bool                     compressed                  = false;
    std::vector<uint64_t>    part_offset[N_STORED_PARTS] = {}; // [n_expert] of each region, from the start of the file
    std::vector<uint64_t>    part_bytes[N_STORED_PARTS]  = {}; // [n_expert] to the end of its last chunk
    uint64_t                 part_slot[N_STORED_PARTS]   = {}; // memory of a region: see give_part_slots()
    std::vector<PackedChunk> chunks                      = {}; // by expert, role and plane
    std::vector<size_t>      first                       = {}; // [n_expert * matrices + 1]: a matrix's first chunk
};

struct MoeLayer {
    int                                il;
    int                                n_expert;
    int                                n_used;         // top-k of its router; 0: missing in the file
    std::vector<ExpertTensor>          tensors;        // in the order of the kernels
    std::shared_ptr<const PackedLayer> pack = nullptr; // null: experts come from the model's own files

    uint64_t expert_bytes() const;
    uint64_t slot_bytes() const; // the memory of one expert for kernels

    // Returns whether this share of the experts lacks the expert.
    bool lacks(int expert) const { return pack && !pack->offset.empty() && pack->offset[expert] == NOWHERE; }

    int first_there() const {
        int expert = 0;
        while (expert < n_expert - 1 && lacks(expert)) {
            ++expert;
        }
        return expert;
    }
};

// LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS of llama.cpp, which asserts them when it loads a model.
constexpr int MAX_LAYERS  = 512;
constexpr int MAX_EXPERTS = 1024;

struct MapFile {
    std::string path;
    uint64_t    bytes;
    uint64_t    span; // to the end of the last tensor; for a slim file larger than the file

    std::vector<std::string> copies = {}; // on other disks, with the same content
};

struct TensorRange {
    int         file; // index into ModelMap::files
    uint64_t    offset;
    uint64_t    bytes;
    std::string type; // ggml type
};

// Throws Failure if the file cannot be read or does not begin like a GGUF.
void check_readable(const std::string & path);

// The layer and role of a tensor of experts.
struct ExpertPlace {
    int layer; // index into ModelMap::layers
    int role;  // index into its tensors
};

class ModelMap {
public:
    // Throws Failure: PYORCH_IO if a file cannot be opened, PYORCH_FORMAT if it is not a complete GGUF.
    explicit ModelMap(const std::string & path);

    // Reads experts from a pack (docs/reference/packs.md) from now on. REQUIRES: the pack belongs to this model.
    // Throws Failure and leaves the map unchanged: PYORCH_IO if the pack cannot be opened, PYORCH_FORMAT if it is
    // damaged, was written for other kernels, or does not have exactly these experts.
    void attach_pack(const std::string & path);

    std::vector<MapFile>               files;            // the model's own, then the pack
    int                                n_shards = 0;     // number of the model's own files
    bool                               slim     = false; // its own file lacks the experts, which are in a pack
    std::vector<MoeLayer>              layers;           // with routed experts, by ascending il
    std::map<std::string, TensorRange> tensors;          // all
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

    // Returns the stored bytes of the largest compressed expert; 0 without any.
    uint64_t parts_bytes() const;

    // The least and the largest number of compressed experts that are staged in memory at once.
    static constexpr int MIN_STAGED = 2;
    int                  max_staged() const;

    // Returns the alignment of regions in compressed records: a page if some region is large enough for direct reads.
    uint64_t region_alignment() const;

    // Sets the top-k of each layer. Throws Failure if a layer has experts and its router uses none, or more.
    void read_top_k();

    // Returns how many experts of a layer must fit into memory to compute it: twice those of a token, and one that is
    // being read.
    int floor_experts(const MoeLayer & layer) const;

    // Returns how many of `layers` run for every token; later layers only predict further tokens.
    int n_decoded() const;

    // Returns the index into `layers`. Throws Failure if il has no routed experts.
    int index_of(int il) const;

    // Returns null if the tensor has no routed experts.
    const ExpertPlace * find_experts(const std::string & tensor) const;

    // Reads metadata of the first shard. Returns false if the key is missing or has another type.
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
