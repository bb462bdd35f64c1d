#include "loading/requests.h"

#include <cstring>

namespace pyorch {

// Exponents of a matrix of at least this size get their own request: so it is recovered while others are read.
static constexpr uint64_t APART_BYTES = 128u << 10;

// The end of a request that begins at `at` and ends before `last`, of at most so many bytes. If a matrix ends within
// them, the request ends with it, so that no layer waits for bytes of later matrices. But small matrices that fit into
// one request share it, except exponents.
static uint64_t request_end(
    const MoeLayer & layer, int expert, const Extent & e, uint64_t at, uint64_t last, uint64_t most) {
    bool     whole = last - at <= most;
    uint64_t end   = whole ? last : at + most;
    for (int role = e.last_role - 1; role >= e.role; --role) {
        const Extent   matrix = extent_of(layer, expert, e, role);
        const uint64_t ends   = round_up(matrix.offset + matrix.bytes, PAGE);
        const bool     apart  = e.part == PART_E && ends >= at + APART_BYTES;
        if (matrix.bytes > 0 && ends > at && ends < end && (apart || !whole)) {
            end   = ends;
            whole = true;
        }
    }
    return end;
}

void Requests::cut(Load & load, const Extent & e, std::deque<ReadRequest> & queue, uint64_t request_bytes) {
    const MoeLayer & layer  = map.layers[load.layer];
    const uint64_t   end    = e.offset + e.bytes;
    const bool       direct = e.direct && source.direct(e.file);
    const uint64_t   first  = direct ? e.offset / PAGE * PAGE : e.offset;
    const uint64_t   last   = direct ? round_up(end, PAGE) : end;
    // A slot has the layout of a record or region, with the pages before a matrix; otherwise the block has room for
    // them.
    char * memory;
    if (e.part != PART_MATRICES) {
        memory = load.parts[e.part].memory + (first - layer.pack->part_offset[e.part][load.expert]);
    } else {
        memory = load.slot.memory + block_offset(layer, e.role) - (layer.pack ? e.offset - first : 0);
    }
    for (uint64_t at = first; at < end;) {
        const uint64_t next    = request_end(layer, load.expert, e, at, last, request_bytes);
        ReadRequest    request = { &load, e.last_role, e.role, e.file, at, next - at, std::min(next, end) - at,
            memory + (at - first), direct, layer.pack != nullptr, 0, 0, e.part, false };
        for (int role = e.role; role <= e.last_role; ++role) {
            const Extent matrix = extent_of(layer, load.expert, e, role);
            if (matrix.bytes > 0 && matrix.offset < next && matrix.offset + matrix.bytes > at) {
                request.role      = std::min(request.role, role);
                request.last_role = std::max(request.last_role, role);
                request.touches |= 1u << role;
                ++load.unread[role];
            }
        }
        queue.push_back(request);
        ++load.queued;
        at = next;
    }
}

// Adds a request that reads nothing. needed: bytes without which the matrix has failed.
void Requests::ask_nothing(Load & load, std::deque<ReadRequest> & queue, int role, uint64_t needed) {
    const MoeLayer & layer = map.layers[load.layer];
    const int        file  = layer.pack ? layer.pack->file : layer.tensors[role].file;
    queue.push_back({ &load, role, role, file, 0, 0, needed, nullptr, false, layer.pack != nullptr, 0, 1u << role,
        PART_MATRICES, false });
    ++load.queued;
    ++load.unread[role];
}

// False: the expert's bytes were not offered.
bool Requests::take_offered(Load & load, std::deque<ReadRequest> & queue) {
    const MoeLayer & layer = map.layers[load.layer];
    const auto       found = offered.find({ load.layer, load.expert });
    if (found == offered.end() || layer.pack) {
        return false;
    }
    const char * bytes = found->second.data();
    for (int role = 0; role < (int) layer.tensors.size(); ++role) {
        const Extent matrix = in_model(layer, role, load.expert);
        if (load.roles >> role & 1) {
            memcpy(load.slot.memory + block_offset(layer, role), bytes, matrix.bytes);
            ask_nothing(load, queue, role);
        }
        bytes += matrix.bytes;
    }
    offered.erase(found);
    return true;
}

void Requests::cut(Load & load, std::deque<ReadRequest> & queue, uint64_t request_bytes) {
    if (take_offered(load, queue)) {
        return;
    }
    const MoeLayer & layer = map.layers[load.layer];
    if (layer.lacks(load.expert)) {
        ask_nothing(load, queue, __builtin_ctz(load.roles), 1);
        return;
    }
    for (const Extent & e : extents(layer, load.expert, load.in_memory)) {
        const uint32_t within = (2u << e.last_role) - (1u << e.role);
        if ((load.roles & within) == within) {
            cut(load, e, queue, request_bytes);
            continue;
        }
        for (int role = e.role; role <= e.last_role; ++role) {
            const Extent matrix = extent_of(layer, load.expert, e, role);
            if ((load.roles >> role & 1) && matrix.bytes > 0) {
                cut(load, matrix, queue, request_bytes);
            }
        }
    }
    for (int role = 0; role < (int) layer.tensors.size(); ++role) {
        if ((load.roles >> role & 1) && load.unread[role] == 0) {
            ask_nothing(load, queue, role);
        }
    }
}

void Requests::wait(Load & load, std::deque<ReadRequest> & queue) {
    const int role = __builtin_ctz(load.roles);
    queue.push_back({ &load, role, role, 0, 0, 0, 0, nullptr, false, true, 0, 0, PART_MATRICES, true });
    ++load.queued;
}

ReadRequest Requests::from_model(Load & load, int role) const {
    const MoeLayer & layer = map.layers[load.layer];
    const Extent     e     = in_model(layer, role, load.expert);
    // The block has no room for the pages around the matrix, so it is read through the page cache.
    ReadRequest request = { &load, role, role, e.file, e.offset, e.bytes, e.bytes,
        load.slot.memory + block_offset(layer, role), false, false, 0, 1u << role, PART_MATRICES, false };
    if (layer.pack->nibbles[role]) {
        request.plain.reset(new char[e.bytes]);
        request.buf = request.plain.get();
    }
    ++load.queued;
    ++load.unread[role];
    return request;
}

} // namespace pyorch
