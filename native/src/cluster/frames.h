// What servers say to each other over a connection: frames, of a header and what its kind says.
//
//     who connects              who listens
//     HELLO                 ->
//                           <-  WELCOME, or REFUSED with a sentence and the end of the connection
//     COMPUTE               ->
//                           <-  COMPUTED, or FAILED with a sentence; in any order
//     PING                  ->
//                           <-  PONG; also unasked, ten times a second at most, while a request waits to be read
//                           <-  REFUSED at any time, with a sentence and the end of the connection
//
// Nothing of a frame is believed before it was checked; what follows a header is read only if its length can be right.
// Numbers are little-endian, as the processors are that llama.cpp's files are for.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pyorch {

enum class FrameKind : uint16_t { HELLO = 1, WELCOME, REFUSED, COMPUTE, COMPUTED, FAILED, PING, PONG };

struct FrameHeader {
    static constexpr uint32_t MAGIC   = 0x58455950; // "PYEX"
    static constexpr uint16_t VERSION = 3;

    uint32_t magic   = MAGIC;
    uint16_t version = VERSION;
    uint16_t kind    = 0;
    uint64_t id      = 0; // of a request and its answer
    uint64_t bytes   = 0; // behind the header
};
static_assert(sizeof(FrameHeader) == 24, "as it is sent");

constexpr size_t MAX_SENTENCE = 1024;

// Texts end with zeros, all of them.
struct Hello {
    char     token[256];
    char     model[128]; // its fingerprint
    uint64_t shape;      // checksum of what its layers and experts are like
};

// Where a server is, and what both sides of a connection have to agree on.
struct Endpoint {
    std::string address;
    int         port;
    std::string token;
    std::string model; // its fingerprint
    uint64_t    shape;
    uint64_t    kernels; // ours
};

// Throws Failure for texts that are too long.
Hello hello_of(const Endpoint & endpoint);

struct Welcome {
    uint64_t kernels;   // checksum of what decides about bits: version, processor, order of weights
    uint64_t max_slots; // of a request
};

// What rows travel as, and their answers. By BF16 the bits are others.
enum class RowType : int32_t { F32, BF16 };

constexpr uint64_t bytes_of(RowType type) { return type == RowType::F32 ? 4 : 2; }

struct ComputeHead {
    int32_t layer; // index into the layers with experts
    int32_t n_embd;
    int32_t n_rows;
    int32_t n_slots;
    int32_t type; // RowType
};

// How the experts of a layer look from outside.
struct LayerShape {
    int n_expert;
    int n_in;  // numbers of a row that an expert gets
    int n_out; // and of one that it gives
};

// Rows for experts of a layer: what follows a ComputeHead. A slot is one row for one expert; slots of an expert are
// those of the whole ubatch, because kernels depend on how many there are.
struct ExpertRows {
    static constexpr int MAX_SLOTS = 1 << 12; // those of a ubatch of 512 tokens with eight experts each

    int             layer;
    int             n_in;
    int             n_rows;
    int             n_slots;
    RowType         type;
    const int32_t * row;    // [n_slots] whose inputs
    const int32_t * expert; // [n_slots]
    const float *   weight; // [n_slots] with which the model multiplies, for those that do it before the experts
    const char *    inputs; // [n_rows][n_in] of the type

    // The inputs of a slot. to: [n_in]
    void copy_inputs(int slot, float * to) const;
};

// A whole frame, as it is sent.
using Frame = std::vector<char>;

Frame make_frame(FrameKind kind, uint64_t id, const void * payload, uint64_t bytes);
Frame make_frame(FrameKind kind, uint64_t id, const std::string & sentence);

// Another id, and room for so many bytes behind the header; how many there are.
void set_header(Frame & frame, uint64_t id, uint64_t bytes);

// The slots of a ubatch that go to one server. slots: ascending, of [n_tokens][n_used]; a row that several of them have
// is in it once. REQUIRES: at most MAX_SLOTS.
Frame make_compute(int layer, int n_used, int n_embd, const std::vector<int> & slots, const int32_t * experts,
    const float * weights, const float * inputs, RowType type = RowType::F32);

// How a payload of COMPUTE of so many bytes begins. Throws Failure for what cannot be.
ComputeHead read_head(const char * payload, uint64_t bytes, const std::vector<LayerShape> & layers,
    int max_slots = ExpertRows::MAX_SLOTS);

// What it says, of so many slots at most; points into it. Throws Failure for what cannot be.
ExpertRows read_compute(const char * payload, uint64_t bytes, const std::vector<LayerShape> & layers,
    int max_slots = ExpertRows::MAX_SLOTS);

// A payload of COMPUTE for so many slots has at most so many bytes.
uint64_t max_compute_bytes(const std::vector<LayerShape> & layers, uint64_t n_slots = ExpertRows::MAX_SLOTS);

// From 32-bit floats, in place.
void narrow(Frame & frame);

// To those. bytes: of BF16.
void widen(const char * bytes, std::vector<float> & to);

// Why a header cannot be right, "" if it can.
std::string fault_of(const FrameHeader & header);

// A sentence that another server sent, of printable characters only.
std::string sentence_of(const char * text, uint64_t bytes);

} // namespace pyorch
