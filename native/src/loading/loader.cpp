#include "loading/loader.h"

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

void Loader::start(Load & load, std::deque<ReadRequest> & queue) {
    const MoeLayer & layer = map.layers[load.layer];
    load.failed = false;
    for (int role = 0; role < (int) layer.tensors.size(); ++role) {
        const Extent   e      = extent(layer.tensors[role], load.expert, load.form);
        const uint64_t end    = e.offset + e.bytes;
        const bool     direct = e.direct && source->direct(e.file);
        const uint64_t first  = direct ? e.offset / PAGE * PAGE : e.offset;
        const uint64_t last   = direct ? (end + PAGE - 1) / PAGE * PAGE : end;
        char *         block  = load.slot.memory + block_offset(layer, role, load.form);
        load.unread[role] = 0;
        for (uint64_t at = first; at < end; at += read_bytes) {
            const uint64_t size = std::min(read_bytes, last - at);
            queue.push_back({ &load, role, e.file, at, size, std::min(at + size, end) - at, block + (at - first), direct });
            ++load.unread[role];
            ++load.queued;
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
        start(*load, demanded);
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
    } else if (n_reading < guess_depth && (!guessed.empty() || orders.order_guess())) {
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
    return pop(request);
}

void Loader::fail(Load & load, int role, const std::string & why) {
    const ExpertTensor & tensor = map.layers[load.layer].tensors[role];
    load.failed = true;
    take_back(load);
    orders.failed(load, format("cannot read expert %d of %s from %s: %s", load.expert, tensor.name.c_str(),
        map.files[tensor.file].path.c_str(), why.c_str()));
}

bool Loader::read(const ReadRequest & request, int64_t result, uint64_t ns) {
    Load &    load = *request.load;
    const int role = request.role;
    std::lock_guard<std::mutex> lock(mutex);
    --n_reading;
    ns_read += ns;
    if (result > 0) {
        read_by_layer[load.layer] += (uint64_t) result;
        recent_bytes += (double) result - 0.02 * recent_bytes;
        recent_ns    += (double) ns - 0.02 * recent_ns;
    }
    if (result < (int64_t) request.needed) {
        fail(load, role, result == -ESTALE ? "the file was changed after it was loaded" :
            result < 0 ? strerror((int) -result) : "the file ends before it");
    } else if (--load.unread[role] == 0 && !load.failed) {
        return true;
    }
    end(request);
    return false;
}

void Loader::decode(const ReadRequest & request) {
    Load &           load  = *request.load;
    const int        role  = request.role;
    const MoeLayer & layer = map.layers[load.layer];
    const Extent     e     = extent(layer.tensors[role], load.expert, load.form);
    char *           block = load.slot.memory + block_offset(layer, role, load.form);
    // The reads of a block begin where its extent does, or at the page before.
    char *           begin   = block + (request.direct ? e.offset % PAGE : 0);
    const char *     address = codecs(load.form).decode(layer.tensors[role], block, begin);
    std::lock_guard<std::mutex> lock(mutex);
    if (!address) {
        fail(load, role, "what was read is damaged");
    } else if (!load.failed) {
        orders.published(load, role, address);
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
