#include "cluster/frames.h"

#include "base/status.h"

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

uint64_t compute_bytes(uint64_t n_rows, uint64_t n_slots, uint64_t n_in) {
    return sizeof(ComputeHead) + n_slots * (2 * sizeof(int32_t) + sizeof(float)) + n_rows * n_in * sizeof(float);
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
    const float * weights, const float * inputs) {
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
    const ComputeHead head  = { layer, n_embd, (int32_t) tokens.size(), (int32_t) slots.size() };
    Frame             frame = begin_frame(FrameKind::COMPUTE, 0, compute_bytes(tokens.size(), slots.size(), n_embd));
    put(frame, &head, 1);
    put(frame, row.data(), row.size());
    put(frame, expert.data(), expert.size());
    put(frame, weight.data(), weight.size());
    for (int token : tokens) {
        put(frame, inputs + (size_t) token * n_embd, n_embd);
    }
    return frame;
}

uint64_t max_compute_bytes(const std::vector<LayerShape> & layers) {
    uint64_t most = 0;
    for (const LayerShape & layer : layers) {
        most = std::max(most, compute_bytes(ExpertRows::MAX_SLOTS, ExpertRows::MAX_SLOTS, layer.n_in));
    }
    return most;
}

ExpertRows read_compute(const char * payload, uint64_t bytes, const std::vector<LayerShape> & layers) {
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
    if (head.n_slots < 1 || head.n_slots > ExpertRows::MAX_SLOTS || head.n_rows < 1 || head.n_rows > head.n_slots) {
        throw Failure(PYORCH_FORMAT, format("%d rows for %d slots", head.n_rows, head.n_slots));
    }
    if (bytes != compute_bytes(head.n_rows, head.n_slots, layer.n_in)) {
        throw Failure(PYORCH_FORMAT,
            format("%llu bytes for %d rows and %d slots", (unsigned long long) bytes, head.n_rows, head.n_slots));
    }
    ExpertRows rows;
    rows.layer   = head.layer;
    rows.n_rows  = head.n_rows;
    rows.n_slots = head.n_slots;
    rows.row     = (const int32_t *) (payload + sizeof(head));
    rows.expert  = rows.row + head.n_slots;
    rows.weight  = (const float *) (rows.expert + head.n_slots);
    rows.inputs  = rows.weight + head.n_slots;
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
