#include "cluster/frames.h"

#include "base/status.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>

namespace pyorch {
namespace {

template <typename T>
void put(Frame & frame, const T * values, size_t n) {
    const size_t at = frame.size();
    frame.resize(at + n * sizeof(T));
    if (n > 0) {
        memcpy(frame.data() + at, values, n * sizeof(T));
    }
}

Frame begin_frame(FrameKind kind, uint64_t id, uint64_t bytes) {
    FrameHeader header;
    header.kind  = (uint16_t) kind;
    header.id    = id;
    header.bytes = bytes;
    Frame frame;
    frame.reserve(sizeof(header) + bytes);
    put(frame, &header, 1);
    return frame;
}

uint64_t compute_bytes(uint64_t n_rows, uint64_t n_slots, uint64_t n_in, RowType type) {
    return sizeof(ComputeHead) + n_slots * (2 * sizeof(int32_t) + sizeof(float)) + n_rows * n_in * bytes_of(type);
}

} // namespace

Hello hello_of(const Endpoint & endpoint) {
    Hello hello = {};
    if (endpoint.token.size() >= sizeof(hello.token) || endpoint.model.size() >= sizeof(hello.model)) {
        throw Failure(PYORCH_INVALID,
            format(
                "a token can have %zu bytes, and a fingerprint %zu", sizeof(hello.token) - 1, sizeof(hello.model) - 1));
    }
    memcpy(hello.token, endpoint.token.data(), endpoint.token.size());
    memcpy(hello.model, endpoint.model.data(), endpoint.model.size());
    hello.shape = endpoint.shape;
    return hello;
}

void set_header(Frame & frame, uint64_t id, uint64_t bytes) {
    FrameHeader header;
    memcpy(&header, frame.data(), sizeof(header));
    header.id    = id;
    header.bytes = bytes;
    memcpy(frame.data(), &header, sizeof(header));
    frame.resize(sizeof(header) + bytes);
}

Frame make_frame(FrameKind kind, uint64_t id, const void * payload, uint64_t bytes) {
    Frame frame = begin_frame(kind, id, bytes);
    put(frame, (const char *) payload, bytes);
    return frame;
}

Frame make_frame(FrameKind kind, uint64_t id, const std::string & sentence) {
    return make_frame(kind, id, sentence.data(), std::min(sentence.size(), MAX_SENTENCE));
}

Frame make_compute(int layer, int n_used, int n_embd, const std::vector<int> & slots, const int32_t * experts,
    const float * weights, const float * inputs, RowType type) {
    std::vector<int32_t> row, expert;
    std::vector<float>   weight;
    std::vector<int>     tokens;
    for (int slot : slots) {
        const int token = slot / n_used;
        if (tokens.empty() || tokens.back() != token) {
            tokens.push_back(token);
        }
        row.push_back((int32_t) tokens.size() - 1);
        expert.push_back(experts[slot]);
        weight.push_back(weights[slot]);
    }
    const ComputeHead head = { layer, n_embd, (int32_t) tokens.size(), (int32_t) slots.size(), (int32_t) type };
    Frame frame = begin_frame(FrameKind::COMPUTE, 0, compute_bytes(tokens.size(), slots.size(), n_embd, type));
    put(frame, &head, 1);
    put(frame, row.data(), row.size());
    put(frame, expert.data(), expert.size());
    put(frame, weight.data(), weight.size());
    std::vector<ggml_bf16_t> narrowed(type == RowType::BF16 ? n_embd : 0);
    for (int token : tokens) {
        const float * input = inputs + (size_t) token * n_embd;
        if (type == RowType::F32) {
            put(frame, input, n_embd);
        } else {
            ggml_fp32_to_bf16_row_ref(input, narrowed.data(), n_embd);
            put(frame, narrowed.data(), narrowed.size());
        }
    }
    return frame;
}

uint64_t max_compute_bytes(const std::vector<LayerShape> & layers, uint64_t n_slots) {
    uint64_t most = 0;
    for (const LayerShape & layer : layers) {
        most = std::max(most, compute_bytes(n_slots, n_slots, layer.n_in, RowType::F32));
    }
    return most;
}

void narrow(Frame & frame) {
    char * const payload = frame.data() + sizeof(FrameHeader);
    const size_t n       = (frame.size() - sizeof(FrameHeader)) / sizeof(float);
    for (size_t i = 0; i < n; ++i) { // each number is read before its place is overwritten
        float number;
        memcpy(&number, payload + i * sizeof(float), sizeof(number));
        const ggml_bf16_t narrowed = ggml_fp32_to_bf16(number);
        memcpy(payload + i * sizeof(narrowed), &narrowed, sizeof(narrowed));
    }
    FrameHeader header;
    memcpy(&header, frame.data(), sizeof(header));
    set_header(frame, header.id, n * sizeof(ggml_bf16_t));
}

void widen(const char * bytes, std::vector<float> & to) {
    ggml_bf16_to_fp32_row((const ggml_bf16_t *) bytes, to.data(), (int64_t) to.size());
}

void ExpertRows::copy_inputs(int slot, float * to) const {
    const char * from = inputs + (size_t) row[slot] * n_in * bytes_of(type);
    if (type == RowType::F32) {
        memcpy(to, from, n_in * sizeof(float));
    } else {
        ggml_bf16_to_fp32_row((const ggml_bf16_t *) from, to, n_in);
    }
}

ComputeHead read_head(const char * payload, uint64_t bytes, const std::vector<LayerShape> & layers, int max_slots) {
    ComputeHead head;
    if (bytes < sizeof(head)) {
        throw Failure(PYORCH_FORMAT, format("a request of %llu bytes", (unsigned long long) bytes));
    }
    memcpy(&head, payload, sizeof(head));
    if (head.layer < 0 || head.layer >= (int) layers.size()) {
        throw Failure(PYORCH_FORMAT, format("a request for layer %d of %zu", head.layer, layers.size()));
    }
    const LayerShape & layer = layers[head.layer];
    if (head.n_embd != layer.n_in) {
        throw Failure(PYORCH_FORMAT, format("rows of %d numbers, not %d", head.n_embd, layer.n_in));
    }
    if (head.n_slots < 1 || head.n_slots > max_slots || head.n_rows < 1 || head.n_rows > head.n_slots) {
        throw Failure(PYORCH_FORMAT, format("%d rows for %d slots", head.n_rows, head.n_slots));
    }
    const auto type = (RowType) head.type;
    if (type != RowType::F32 && type != RowType::BF16) {
        throw Failure(PYORCH_FORMAT, format("rows of type %d", head.type));
    }
    if (bytes != compute_bytes(head.n_rows, head.n_slots, layer.n_in, type)) {
        throw Failure(PYORCH_FORMAT,
            format("%llu bytes for %d rows and %d slots", (unsigned long long) bytes, head.n_rows, head.n_slots));
    }
    return head;
}

ExpertRows read_compute(const char * payload, uint64_t bytes, const std::vector<LayerShape> & layers, int max_slots) {
    const ComputeHead  head  = read_head(payload, bytes, layers, max_slots);
    const LayerShape & layer = layers[head.layer];
    ExpertRows         rows;
    rows.layer   = head.layer;
    rows.n_in    = head.n_embd;
    rows.type    = (RowType) head.type;
    rows.n_rows  = head.n_rows;
    rows.n_slots = head.n_slots;
    rows.row     = (const int32_t *) (payload + sizeof(head));
    rows.expert  = rows.row + head.n_slots;
    rows.weight  = (const float *) (rows.expert + head.n_slots);
    rows.inputs  = (const char *) (rows.weight + head.n_slots);
    for (int s = 0; s < rows.n_slots; ++s) {
        if (rows.row[s] < 0 || rows.row[s] >= rows.n_rows) {
            throw Failure(PYORCH_FORMAT, format("row %d of %d", rows.row[s], rows.n_rows));
        }
        if (rows.expert[s] < 0 || rows.expert[s] >= layer.n_expert) {
            throw Failure(PYORCH_FORMAT, format("expert %d of %d", rows.expert[s], layer.n_expert));
        }
    }
    return rows;
}

std::string fault_of(const FrameHeader & header) {
    if (header.magic != FrameHeader::MAGIC) {
        return "what it sends are no frames";
    }
    if (header.version != FrameHeader::VERSION) {
        return format("its frames are of version %d, not %d", header.version, FrameHeader::VERSION);
    }
    return "";
}

std::string sentence_of(const char * text, uint64_t bytes) {
    std::string sentence(text, bytes);
    std::replace_if(sentence.begin(), sentence.end(), [](unsigned char c) { return c < ' ' || c == 127; }, '?');
    return sentence;
}

} // namespace pyorch
