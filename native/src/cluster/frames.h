// The protocol between servers: frames of a header and a payload.
//
//     connecting server         listening server
//     HELLO                 ->
//                           <-  WELCOME, or REFUSED with a sentence and the end of the connection
//     COMPUTE               ->
//                           <-  COMPUTED, or FAILED with a sentence; in any order
//     PING                  ->
//                           <-  PONG; also unasked, ten times a second at most, while a request waits to be read
//                           <-  REFUSED at any time, with a sentence and the end of the connection
//
// Every field is checked before its use. A payload is read only if its length is possible. Numbers are little-endian,
// like the processors that llama.cpp's files are for.

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
    uint64_t id      = 0; // the same in a request and its answer
    uint64_t bytes   = 0; // of the payload
};
static_assert(sizeof(FrameHeader) == 24, "as it is sent");

constexpr size_t MAX_SENTENCE = 1024;

// Texts are filled up with zeros, at least one.
struct Hello {
    char     token[256];
    char     model[128]; // its fingerprint
    uint64_t shape;      // checksum over its layers and experts
};

// The address of a server, and the facts on which both sides must agree.
struct Endpoint {
    std::string address;
    int         port;
    std::string token;
    std::string model; // its fingerprint
    uint64_t    shape;
    uint64_t    kernels; // own checksum
};

// Throws Failure if a text is too long.
Hello hello_of(const Endpoint & endpoint);

struct Welcome {
    uint64_t kernels;   // checksum over all that decides bits: version, processor, order of weights
    uint64_t max_slots; // of a request
};

// The type of rows and answers on the network. BF16 changes bits.
enum class RowType : int32_t { F32, BF16 };

constexpr uint64_t bytes_of(RowType type) { return type == RowType::F32 ? 4 : 2; }

struct ComputeHead {
    int32_t layer; // index into the layers with experts
    int32_t n_embd;
    int32_t n_rows;
    int32_t n_slots;
    int32_t type; // RowType
};

// The sizes of a layer's experts.
struct LayerShape {
    int n_expert;
    int n_in;  // numbers of an input row
    int n_out; // numbers of an output row
};

// Rows for experts of a layer: the payload after a ComputeHead. A slot is one row for one expert. All slots of an
// expert in a ubatch are in one request, because kernels depend on their number.
struct ExpertRows {
    static constexpr int MAX_SLOTS = 1 << 12; // a ubatch of 512 tokens with eight experts each

    int             layer;
    int             n_in;
    int             n_rows;
    int             n_slots;
    RowType         type;
    const int32_t * row;    // [n_slots] index of the input row
    const int32_t * expert; // [n_slots]
    const float *   weight; // [n_slots] factor, for models that multiply before the experts
    const char *    inputs; // [n_rows][n_in] of the type

    // Copies the inputs of a slot. to: [n_in]
    void copy_inputs(int slot, float * to) const;
};

// A whole frame, ready to send.
using Frame = std::vector<char>;

Frame make_frame(FrameKind kind, uint64_t id, const void * payload, uint64_t bytes);
Frame make_frame(FrameKind kind, uint64_t id, const std::string & sentence);

// Sets another id, and the size of the payload. Returns that size.
void set_header(Frame & frame, uint64_t id, uint64_t bytes);

// The slots of a ubatch that go to one server. slots: ascending, of [n_tokens][n_used]; a row of several slots is sent
// once. REQUIRES: at most MAX_SLOTS.
Frame make_compute(int layer, int n_used, int n_embd, const std::vector<int> & slots, const int32_t * experts,
    const float * weights, const float * inputs, RowType type = RowType::F32);

// The head of a payload of COMPUTE. Throws Failure if it is impossible.
ComputeHead read_head(const char * payload, uint64_t bytes, const std::vector<LayerShape> & layers,
    int max_slots = ExpertRows::MAX_SLOTS);

// The rows of a payload, with at most max_slots; they point into it. Throws Failure if it is impossible.
ExpertRows read_compute(const char * payload, uint64_t bytes, const std::vector<LayerShape> & layers,
    int max_slots = ExpertRows::MAX_SLOTS);

// The most bytes of a payload of COMPUTE for so many slots.
uint64_t max_compute_bytes(const std::vector<LayerShape> & layers, uint64_t n_slots = ExpertRows::MAX_SLOTS);

// From 32-bit floats to BF16, in place.
void narrow(Frame & frame);

// From BF16 to 32-bit floats. bytes: of BF16.
void widen(const char * bytes, std::vector<float> & to);

// The fault of a header; "" if it has none.
std::string fault_of(const FrameHeader & header);

// A sentence of another server, with printable characters only.
std::string sentence_of(const char * text, uint64_t bytes);

} // namespace pyorch
