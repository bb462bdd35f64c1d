#include "loading/loader.h"

#include "base/notice.h"
#include "loading/reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pyorch {

Loader::Loader(const ModelMap & map, std::unique_ptr<Source> source, Codecs codecs, uint64_t read_bytes,
               std::mutex & mutex, Orders & orders) :
        map(map),
        source(std::move(source)),
        codecs(std::move(codecs)),
        read_bytes(std::max(read_bytes / PAGE * PAGE, PAGE)),
        mutex(mutex),
        orders(orders),
        read_by_layer(map.layers.size()) {}

// The end of a request of at most so many bytes that begins at `at`, before last. Where a matrix ends within reach the
// request ends with it, so that nobody waits for bytes that the kernels need later; but what fits into one is read by one.
static uint64_t request_end(const MoeLayer & layer, Form form, const Extent & e, uint64_t at, uint64_t last,
                            uint64_t most) {
    if (last - at <= most) {
        return last;
    }
    for (int role = e.last_role - 1; role >= e.role; --role) {
        const uint64_t begin = e.offset + block_offset(layer, role, form) - block_offset(layer, e.role, form);
        const uint64_t end   = (begin + layer.tensors[role].stride + PAGE - 1) / PAGE * PAGE;
        if (end > at && end - at <= most) {
            return end;
        }
    }
    return at + most;
}

void Loader::cut(Load & load, const Extent & e, std::deque<ReadRequest> & queue, uint64_t request_bytes) {
    const MoeLayer & layer  = map.layers[load.layer];
    const uint64_t   end    = e.offset + e.bytes;
    const bool       direct = e.direct && source->direct(e.file);
    const uint64_t   first  = direct ? e.offset / PAGE * PAGE : e.offset;
    const uint64_t   last   = direct ? (end + PAGE - 1) / PAGE * PAGE : end;
    const uint64_t   block  = block_offset(layer, e.role, load.form);
    // A slot has the layout of a record, pages before a matrix included; else the block has room for them.
    char *           memory = load.slot.memory + block - (layer.pack ? e.offset - first : 0);
    for (uint64_t at = first; at < end;) {
        const uint64_t next = request_end(layer, load.form, e, at, last, request_bytes);
        ReadRequest request = { &load, e.last_role, e.role, e.file, at, next - at, std::min(next, end) - at,
            memory + (at - first), direct, layer.pack != nullptr, 0 };
        for (int role = e.role; role <= e.last_role; ++role) {
            const uint64_t begin = e.offset + block_offset(layer, role, load.form) - block;
            if (begin < next && begin + layer.tensors[role].stride > at) {
                request.role      = std::min(request.role, role);
                request.last_role = role;
                ++load.unread[role];
            }
        }
        queue.push_back(request);
        ++load.queued;
        at = next;
    }
}

void Loader::start(Load & load, std::deque<ReadRequest> & queue, uint64_t request_bytes) {
    load.failed = false;
    load.read   = 0;
    for (int role = 0; role < PYORCH_MAX_ROLES; ++role) {
        load.unread[role] = 0;
        load.missed[role] = false;
    }
    const MoeLayer & layer = map.layers[load.layer];
    for (const Extent & e : extents(layer, load.expert, load.form)) {
        const uint32_t within = (2u << e.last_role) - (1u << e.role);
        if ((load.roles & within) == within) {
            cut(load, e, queue, request_bytes);
            continue;
        }
        for (int role = e.role; role <= e.last_role; ++role) {
            if (load.roles >> role & 1) {
                const uint64_t before = block_offset(layer, role, load.form) - block_offset(layer, e.role, load.form);
                cut(load, { e.file, e.offset + before, layer.tensors[role].stride, e.direct, role, role }, queue,
                    request_bytes);
            }
        }
    }
}

void Loader::demand(const std::vector<Load *> & loads, const std::vector<Load *> & queued) {
    const size_t before = demanded.size();
    if (!queued.empty()) {
        for (auto * queue : { &ahead, &guessed }) {
            auto hurried = std::stable_partition(queue->begin(), queue->end(), [&](const ReadRequest & r) {
                return std::find(queued.begin(), queued.end(), r.load) == queued.end();
            });
            demanded.insert(demanded.end(), hurried, queue->end());
            queue->erase(hurried, queue->end());
        }
    }
    for (Load * load : loads) {
        start(*load, demanded, read_bytes);
    }
    std::stable_sort(demanded.begin() + before, demanded.end(), [](const ReadRequest & a, const ReadRequest & b) {
        return a.role != b.role ? a.role < b.role : a.load->expert < b.load->expert;
    });
}

void Loader::take_back(Load & load) {
    for (auto * queue : { &guessed, &ahead, &demanded }) {
        if (load.queued == 0) {
            return;
        }
        auto mine = std::stable_partition(queue->begin(), queue->end(),
            [&](const ReadRequest & r) { return r.load != &load; });
        load.queued -= (int) (queue->end() - mine);
        queue->erase(mine, queue->end());
    }
}

bool Loader::pop(ReadRequest & request) {
    std::deque<ReadRequest> * queue;
    if (!demanded.empty()) {
        queue = &demanded;
    } else if (!ahead.empty() || orders.order_ahead()) {
        queue = &ahead;
    } else if (n_reading == 0 && (!guessed.empty() || orders.order_guess())) {
        queue = &guessed;
    } else {
        return false;
    }
    request = queue->front();
    queue->pop_front();
    --request.load->queued;
    ++request.load->in_flight;
    ++n_reading;
    ++n_in_flight;
    return true;
}

bool Loader::next(ReadRequest & request) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopped) {
        if (pop(request)) {
            return true;
        }
        work.wait(lock);
    }
    return false;
}

bool Loader::try_next(ReadRequest & request) {
    std::lock_guard<std::mutex> lock(mutex);
    return !stopped && pop(request);
}

uint64_t Loader::slot_bytes(const ReadRequest & request) const {
    return pyorch::slot_bytes(map.layers[request.load->layer], request.load->form);
}

void Loader::watch_memory() {
    std::lock_guard<std::mutex> lock(mutex);
    watched = true;
}

void Loader::given_up(char * slot) {
    if (watched) {
        stripped.push_back(slot);
        any_stripped = true;
    }
}

void Loader::take_given_up(std::vector<char *> & slots) {
    slots.clear();
    if (any_stripped) {
        std::lock_guard<std::mutex> lock(mutex);
        slots.swap(stripped);
        any_stripped = false;
    }
}

void Loader::fail(Load & load, int role, int file, const std::string & why) {
    load.failed = true;
    take_back(load);
    orders.failed(load, format("cannot read expert %d of %s from %s: %s", load.expert,
        map.layers[load.layer].tensors[role].name.c_str(), map.files[file].path.c_str(), why.c_str()));
}

// What a request was to bring of a matrix is not there, or damaged: the model's own file has it too.
void Loader::missing(const ReadRequest & request, int role, const char * why) {
    Load & load = *request.load;
    if (!request.from_pack || map.slim) {
        fail(load, role, request.file, why);
        return;
    }
    const MoeLayer & layer = map.layers[load.layer];
    const Extent     e     = in_model(layer, role, load.expert);
    if (!said) {
        said = true;
        notice(format("note: cannot read expert %d of %s from %s: %s; it is read from %s, and so is all that cannot be "
            "read there: see `pyorch pack --check`", load.expert, layer.tensors[role].name.c_str(),
            map.files[request.file].path.c_str(), why, map.files[e.file].path.c_str()));
    }
    // The block has no room for the pages around the matrix: so it is read through the page cache.
    demanded.push_front({ &load, role, role, e.file, e.offset, e.bytes, e.bytes,
        load.slot.memory + block_offset(layer, role, load.form), false, false, 0 });
    ++load.queued;
    ++load.unread[role];
    load.missed[role] = false;
    wake();
}

static const char * reason(int64_t result) {
    return result == -ESTALE ? "the file was changed after it was loaded" :
        result < 0 ? strerror((int) -result) : "the file ends before it";
}

bool Loader::read(ReadRequest & request, int64_t result, uint64_t ns, uint64_t cpu_ns) {
    Load & load = *request.load;
    std::lock_guard<std::mutex> lock(mutex);
    --n_reading;
    ns_read += ns;
    if (result > 0) {
        read_by_layer[load.layer] += (uint64_t) result;
        load.read    += (uint64_t) result;
        recent_bytes += (double) result - 0.02 * recent_bytes;
        recent_ns    += (double) ns - 0.02 * recent_ns;
        recent_cpu   += (double) cpu_ns - 0.02 * recent_cpu;
    }
    request.complete = 0;
    const bool is_short = result < (int64_t) request.needed;
    for (int role = request.role; role <= request.last_role && !load.failed; ++role) {
        load.missed[role] |= is_short;
        if (--load.unread[role] > 0) {
            continue;
        }
        if (load.missed[role]) {
            missing(request, role, is_short ? reason(result) : "another part of it could not be read");
        } else {
            request.complete |= 1u << role;
        }
    }
    if (request.complete) {
        return true;
    }
    end(request);
    return false;
}

// Verifies and decodes a matrix of which everything was read, and publishes it. False if it is damaged.
bool Loader::arrived(const ReadRequest & request, int role) {
    Load &           load  = *request.load;
    const MoeLayer & layer = map.layers[load.layer];
    const Codec &    codec = codecs(load.form);
    char *           block = load.slot.memory + block_offset(layer, role, load.form);
    // Reads of a block begin where the matrix does, or at the page before, which for what a pack holds is the same.
    const bool       widened = request.direct && !layer.pack;
    char *           begin   = block + (widened ? in_model(layer, role, load.expert).offset % PAGE : 0);
    const bool       intact  = !request.from_pack || codec.intact(layer, role, load.expert, begin);
    const bool       is_done = request.from_pack && layer.pack->repacked[role];
    const char *     address = !intact ? nullptr : is_done ? begin : codec.decode(layer.tensors[role], block, begin);
    std::lock_guard<std::mutex> lock(mutex);
    if (address && !load.failed) {
        orders.published(load, role, address);
    }
    return address != nullptr;
}

void Loader::decode(const ReadRequest & request) {
    uint32_t damaged = 0;
    for (int role = request.role; role <= request.last_role; ++role) {
        if ((request.complete >> role & 1) && !arrived(request, role)) {
            damaged |= 1u << role;
        }
    }
    std::lock_guard<std::mutex> lock(mutex);
    for (int role = request.role; role <= request.last_role; ++role) {
        if ((damaged >> role & 1) && !request.load->failed) {
            missing(request, role, "what was read is damaged");
        }
    }
    end(request);
}

void Loader::end(const ReadRequest & request) {
    --request.load->in_flight;
    --n_in_flight;
    orders.finished(*request.load);
}

void Loader::wake() {
    work.notify_all();
    std::lock_guard<std::mutex> lock(waking);
    if (reader) {
        reader->wake();
    }
}

void Loader::wait(std::unique_lock<std::mutex> & lock, std::condition_variable & changed) {
    if (reader) {
        reader->wait(lock, changed);
    } else {
        changed.wait(lock);
    }
}

void Loader::reset_stats() {
    std::fill(read_by_layer.begin(), read_by_layer.end(), 0);
    ns_read = 0;
}

void Loader::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
    }
    wake();
}

} // namespace pyorch
