#include "loading/loader.h"

#include "base/barrier.h"
#include "base/cpu_time.h"
#include "base/status.h"
#include "codecs/nibble.h"
#include "loading/readers.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

namespace pyorch {

Loader::Loader(const ModelMap & map, std::unique_ptr<Source> source, const Codec & codec, uint64_t read_bytes,
    Mutex & mutex, Orders & orders) :
        map(map), source(std::move(source)), codec(codec), read_bytes(std::max(read_bytes / PAGE * PAGE, PAGE)),
        mutex(mutex), orders(orders), requests(map, *this->source), read_by_layer(map.layers.size()) {}

void Loader::start(Load & load, std::deque<ReadRequest> & into, uint64_t request_bytes) {
    load.failed  = false;
    load.damaged = false;
    load.urgent  = &into == &queue.demanded;
    load.read    = 0;
    std::fill(std::begin(load.unread), std::end(load.unread), 0);
    std::fill(std::begin(load.missed), std::end(load.missed), false);
    if (!is_compressed(map.layers[load.layer]) || orders.stage(mutex.locked(), load) == Staged::YES) {
        requests.cut(load, into, request_bytes);
        return;
    }
    Requests::wait(load, into);
}

// Algorithm 1 of ZipMoE for the compressed experts' matrices of one layer, with the recent rates of the disk and of the
// codec. It groups the matrices of an expert; an expert with more rows is recovered sooner.
void Loader::place_for_recovery(const std::vector<Load *> & loads, const Recoverer & by) {
    const double                        speed   = rates.bytes_per_second();
    const double                        read    = speed > 0 ? 1 / speed : 1;
    const auto                          decoded = (double) counted.bytes_decoded;
    const double                        decode  = decoded > 0 ? 1e-9 * (double) ns_decoded / decoded : 0;
    std::vector<RecoveryTask>           tasks;
    std::vector<std::pair<Load *, int>> matrices; // by task
    for (Load * load : loads) {
        const MoeLayer & layer                                   = map.layers[load->layer];
        double           bytes[N_STORED_PARTS][PYORCH_MAX_ROLES] = {};
        for (const Extent & e : extents(layer, load->expert, load->in_memory)) {
            for (int role = e.role; role <= e.last_role; ++role) {
                bytes[e.part][role] += (double) extent_of(layer, load->expert, e, role).bytes;
            }
        }
        load->scheduled = true;
        for (int role = 0; role < (int) layer.tensors.size(); ++role) {
            if (!(load->roles >> role & 1)) {
                continue;
            }
            if (load->staged && load->unread[role] == 0) { // it was read ahead
                load->place[role] = load->sm_place[role] = -1;
                continue;
            }
            const int n_chunks = Codec::recovery_steps(layer, role, load->expert); // the last is signs and mantissas
            tasks.push_back({ load->expert, read * bytes[PART_E][role], read * bytes[PART_SM][role],
                decode * (double) layer.tensors[role].stride, std::max(1, n_chunks - 1), (double) load->n_rows });
            matrices.emplace_back(load, role);
        }
    }
    int place = 0;
    for (const RecoveryBlock & block : schedule(tasks, by)) {
        for (int task : block) {
            const auto [load, role] = matrices[(size_t) task];
            load->place[role]       = place++;
            load->sm_place[role]    = load->place[role] + (by.one_pass ? 0 : (int) block.size());
        }
        place += by.one_pass ? 0 : (int) block.size();
    }
}

void Loader::demand(const Locked & locked, const std::vector<Load *> & loads, const std::vector<Load *> & queued,
    const Recoverer & by) {
    mutex.assert_held(locked);
    const size_t before = queue.demanded.size();
    for (Load * load : loads) {
        load->in_order_of_kernels();
    }
    if (!queued.empty()) {
        queue.hurry(queued);
        for (Load * load : queued) {
            load->urgent = true;
        }
    }
    std::vector<Load *> in_order = loads; // the order in which they get memory for stored parts
    if (by.n_workers > 0) {
        std::vector<Load *> all = queued;
        all.insert(all.end(), loads.begin(), loads.end());
        place_for_recovery(all, by);
        std::stable_sort(in_order.begin(), in_order.end(),
            [](const Load * a, const Load * b) { return place_of(*a, a->roles) < place_of(*b, b->roles); });
    }
    for (Load * load : in_order) {
        start(*load, queue.demanded, read_bytes);
    }
    if (!queued.empty()) {
        decoding.sort([](const Decoding & a, const Decoding & b) { return a.goes_before(b); });
    }
    std::stable_sort(queue.demanded.begin() + before, queue.demanded.end(), goes_before);
}

// Takes the first request of a queue that a reader can serve.
bool Loader::take(std::deque<ReadRequest> & from, uint64_t request_bytes, ReadRequest & request) {
    for (size_t i = 0; i < from.size();) {
        Load & load = *from[i].load;
        if (!from[i].waits) {
            request = from[i];
            from.erase(from.begin() + i);
            return true;
        }
        const Staged staged = orders.stage(mutex.locked(), load);
        if (staged == Staged::LATER) {
            ++i;
        } else if (staged == Staged::YES) {
            std::deque<ReadRequest> cut;
            requests.cut(load, cut, request_bytes);
            replace_waiting(from, i, cut);
        } else {
            fail(load, from[i].role, from[i].file, "there is no memory for it"); // removes the request
            orders.finished(mutex.locked(), load);
            i = 0;
        }
    }
    return false;
}

bool Loader::pop(ReadRequest & request) {
    // A load that waits for memory gets it next: nothing behind it begins.
    const bool any = take(queue.demanded, read_bytes, request) || take(queue.ahead, read_bytes, request) ||
        (queue.demanded.empty() && queue.ahead.empty() && orders.order_ahead(mutex.locked()) &&
            take(queue.ahead, read_bytes, request)) ||
        (n_reading < source->n_disks() &&
            (take(queue.guessed, guess_bytes(), request) ||
                (queue.demanded.empty() && queue.ahead.empty() && queue.guessed.empty() &&
                    orders.order_guess(mutex.locked()) && take(queue.guessed, guess_bytes(), request))));
    if (!any) {
        return false;
    }
    --request.load->queued;
    ++request.load->in_flight;
    request.waited_for = request.load->urgent && request.reads();
    if (request.waited_for) {
        rates.begin_wait();
    }
    ++n_reading;
    ++n_in_flight;
    return true;
}

bool Loader::next(ReadRequest & request) {
    MutexLock lock(mutex);
    for (;;) {
        if (!stopped && pop(request)) {
            return true;
        }
        if (decode_first()) {
            continue;
        }
        if (stopped) {
            return false;
        }
        work.wait(mutex);
    }
}

bool Loader::try_next(ReadRequest & request) {
    MutexLock lock(mutex);
    return !stopped && pop(request);
}

Loader::Memory Loader::slot_of(const ReadRequest & request) const {
    const Load & load = *request.load;
    const Slot & slot = request.part == PART_MATRICES ? load.slot : load.parts[request.part];
    return { slot.memory, slot_bytes(map.layers[load.layer], request.part), slot.fresh };
}

void Loader::watch_memory() {
    MutexLock lock(mutex);
    watched = true;
}

void Loader::given_up(const Locked & locked, char * slot) {
    mutex.assert_held(locked);
    if (watched) {
        stripped.push_back(slot);
        any_stripped = true;
    }
}

void Loader::take_given_up(std::vector<char *> & slots) {
    slots.clear();
    if (any_stripped) {
        MutexLock lock(mutex);
        slots.swap(stripped);
        any_stripped = false;
    }
}

void Loader::fail(Load & load, int role, int file, const std::string & why) {
    const MoeLayer &  layer = map.layers[load.layer];
    const std::string from  = layer.lacks(load.expert) ? "" : " from " + map.files[file].path;
    load.failed             = true;
    queue.take_back(load);
    orders.failed(mutex.locked(), load,
        format("cannot read expert %d of %s%s: %s", load.expert, layer.tensors[role].name.c_str(), from.c_str(),
            why.c_str()));
}

static constexpr const char * CHANGED = "the file was changed after it was loaded";

// A request could not bring a matrix, or brought a damaged one: the model's own file has it too.
void Loader::missing(const ReadRequest & request, int role, const char * why) {
    Load & load  = *request.load;
    load.damaged = true;
    if (map.layers[load.layer].lacks(load.expert)) {
        why = "it is not in this share of the experts, and no server that has it answers";
    } else if (request.from_pack && source->changed(request.file)) {
        why = CHANGED;
    }
    if (!request.from_pack || map.slim) {
        fail(load, role, request.file, why);
        return;
    }
    const MoeLayer & layer = map.layers[load.layer];
    if (!said) {
        said = true;
        notice(format("note: cannot read expert %d of %s from %s: %s; it is read from %s, and so is all that cannot be "
                      "read there: see `pyorch pack --check`",
            load.expert, layer.tensors[role].name.c_str(), map.files[request.file].path.c_str(), why,
            map.files[layer.tensors[role].file].path.c_str()));
    }
    queue.demanded.push_front(requests.from_model(load, role));
    load.missed[role] = false;
    wake();
}

static const char * reason(int64_t result) {
    return result == -ESTALE ? CHANGED : result < 0 ? strerror((int) -result) : "the file ends before it";
}

bool Loader::read(ReadRequest & request, int64_t result, uint64_t ns, uint64_t cpu_ns) {
    Load &    load = *request.load;
    MutexLock lock(mutex);
    --n_reading;
    if (request.waited_for) {
        rates.end_wait();
    }
    counted.read_ns += ns;
    if (result > 0) {
        read_by_layer[load.layer] += (uint64_t) result;
        load.read += (uint64_t) result;
        rates.add((uint64_t) result, ns, cpu_ns);
    }
    request.complete    = 0;
    const bool is_short = result < (int64_t) request.needed;
    for (int role = request.role; role <= request.last_role && !load.failed; ++role) {
        if (!(request.touches >> role & 1)) {
            continue;
        }
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
    if (!request.complete) {
        end(request);
        return false;
    }
    const int n_more = __builtin_popcount(request.complete) - 1; // each matrix ends on its own
    load.in_flight += n_more;
    n_in_flight += n_more;
    return true;
}

// A smaller matrix is not shared.
static constexpr uint64_t MIN_SHARED_BYTES = 128u << 10;

Loader::Decoding Loader::decoding_of(const ReadRequest & request, int role) const {
    const MoeLayer & layer   = map.layers[request.load->layer];
    const bool       recover = request.from_pack && is_compressed(layer);
    const bool       share   = layer.tensors[role].stride >= MIN_SHARED_BYTES;
    const int        n_steps = recover && share ? Codec::recovery_steps(layer, role, request.load->expert) : 1;
    return { request, role, n_steps, clock_ns() };
}

// For a matrix in the model's form. False: it cannot be what was packed.
static bool make_nibbles(const ExpertTensor & tensor, const char * plain, char * block) {
    std::vector<uint8_t> made;
    const bool           fits = encode_nibbles((const uint8_t *) plain, tensor.n_in, tensor.n_out, made);
    std::copy(made.begin(), made.end(), (uint8_t *) block);
    return fits;
}

// False: it is damaged.
bool Loader::decode_step(const Decoding & matrix, int step) {
    const ReadRequest & request = matrix.request;
    const Load &        load    = *request.load;
    const MoeLayer &    layer   = map.layers[load.layer];
    char *              block   = load.slot.memory + block_offset(layer, matrix.role);
    if (!request.from_pack) {
        return !request.plain || make_nibbles(layer.tensors[matrix.role], request.plain.get(), block);
    }
    if (!is_compressed(layer)) {
        return codec.intact(layer, matrix.role, load.expert, block);
    }
    const uint64_t begin = clock_ns();
    const int      end   = matrix.n_steps == 1 ? Codec::recovery_steps(layer, matrix.role, load.expert) : step + 1;
    bool           whole = true;
    for (; step < end && whole; ++step) {
        whole = codec.recover(
            layer, matrix.role, load.expert, step, load.parts[PART_E].memory, load.parts[PART_SM].memory, block);
    }
    ns_decoded += clock_ns() - begin;
    return whole;
}

// The address of a matrix whose steps are all done; null if it is damaged.
const char * Loader::decoded_at(const Decoding & matrix) {
    const ReadRequest & request = matrix.request;
    const Load &        load    = *request.load;
    const MoeLayer &    layer   = map.layers[load.layer];
    char *              begin   = load.slot.memory + block_offset(layer, matrix.role);
    char *              block   = begin;
    // A block's reads begin at the matrix or at the page before; for the contents of a pack that is the same.
    if (request.direct && !layer.pack) {
        begin += in_model(layer, matrix.role, load.expert).offset % PAGE;
    }
    const bool as_packed =
        layer.pack && (layer.pack->nibbles[matrix.role] || (request.from_pack && layer.pack->repacked[matrix.role]));
    return matrix.damaged ? nullptr : as_packed ? begin : codec.decode(layer.tensors[matrix.role], block, begin);
}

// Publishes a matrix whose steps are all done, if it is not damaged. address: the result of decoded_at().
void Loader::end_decoding(const Decoding & matrix, const char * address) {
    const ReadRequest & request = matrix.request;
    if (request.from_pack && is_compressed(map.layers[request.load->layer])) {
        counted.bytes_decoded += map.layers[request.load->layer].tensors[matrix.role].stride;
    }
    if (!request.load->failed) {
        if (address) {
            orders.published(mutex.locked(), *request.load, matrix.role, address);
        } else {
            missing(request, matrix.role, "what was read is damaged");
        }
    }
    end(request);
}

uint64_t Loader::bytes_to_decode(const ReadRequest & request) const {
    const MoeLayer & layer = map.layers[request.load->layer];
    uint64_t         bytes = 0;
    for (size_t role = 0; request.from_pack && is_compressed(layer) && role < layer.tensors.size(); ++role) {
        bytes += request.complete >> role & 1 ? layer.tensors[role].stride : 0;
    }
    return bytes;
}

int Loader::steps_to_decode(const ReadRequest & request) const {
    int n = 0;
    for (int role = request.role; role <= request.last_role; ++role) {
        n += request.complete >> role & 1 ? decoding_of(request, role).n_steps : 0;
    }
    return n;
}

void Loader::decode(const ReadRequest & request) {
    for (int role = request.role; role <= request.last_role; ++role) {
        if (!(request.complete >> role & 1)) {
            continue;
        }
        Decoding matrix = decoding_of(request, role);
        for (int step = 0; step < matrix.n_steps; ++step) {
            matrix.damaged |= !decode_step(matrix, step);
        }
        const char * address = decoded_at(matrix);
        MutexLock    lock(mutex);
        end_decoding(matrix, address);
    }
}

void Loader::decode_later(const ReadRequest & request) {
    {
        MutexLock lock(mutex);
        for (int role = request.role; role <= request.last_role; ++role) {
            if (request.complete >> role & 1) {
                const Decoding matrix = decoding_of(request, role);
                decoding.insert(std::find_if(decoding.begin(), decoding.end(),
                                    [&](const Decoding & other) { return matrix.goes_before(other); }),
                    matrix);
            }
        }
        orders.decodable(mutex.locked());
    }
    decode_work.notify_one();
    work.notify_one();
}

bool Loader::decode_next(const Locked & locked) {
    mutex.assert_held(locked);
    return decode_first();
}

bool Loader::decode_first() {
    const auto matrix =
        std::find_if(decoding.begin(), decoding.end(), [](const Decoding & each) { return each.begun < each.n_steps; });
    if (matrix == decoding.end()) {
        return false;
    }
    const int      step = matrix->begun++;
    const uint64_t cpu  = thread_cpu_ns();
    bool           intact;
    {
        MutexUnlock unlock(mutex);
        intact = decode_step(*matrix, step);
    }
    matrix->damaged |= !intact;
    if (++matrix->ended == matrix->n_steps) {
        const Decoding whole = *matrix;
        decoding.erase(matrix);
        const char * address;
        {
            MutexUnlock unlock(mutex);
            address = decoded_at(whole);
        }
        end_decoding(whole, address);
    }
    rates.add_cpu(thread_cpu_ns() - cpu);
    return true;
}

// After this time no layer is thought to wait: the load is a guess, or nothing computes now.
static constexpr auto PATIENCE = std::chrono::milliseconds(20);

bool Loader::decode_next() {
    MutexLock lock(mutex);
    for (;;) {
        uint64_t oldest = UINT64_MAX;
        for (const Decoding & matrix : decoding) {
            oldest = matrix.begun < matrix.n_steps ? std::min(oldest, matrix.since) : oldest;
        }
        const std::chrono::steady_clock::time_point due(std::chrono::nanoseconds(oldest) + PATIENCE);
        const bool                                  is_due =
            !decodes || !has_waiters || processors_to_spare() || std::chrono::steady_clock::now() >= due;
        if (is_due && decode_first()) {
            return true;
        }
        if (!decodes) {
            return false;
        }
        if (oldest == UINT64_MAX) {
            decode_work.wait(mutex);
        } else {
            decode_work.wait_until(mutex, due);
        }
    }
}

void Loader::stop_decoding() {
    {
        MutexLock lock(mutex);
        decodes = false;
    }
    decode_work.notify_all();
}

void Loader::end(const ReadRequest & request) {
    --request.load->in_flight;
    --n_in_flight;
    orders.finished(mutex.locked(), *request.load);
}

void Loader::wake() {
    work.notify_all();
    MutexLock lock(waking);
    if (reader) {
        reader->wake();
    }
}

void Loader::wait(const Locked & locked, CondVar & changed) {
    mutex.assert_held(locked);
    if (reader) {
        reader->wait(mutex, changed);
    } else {
        changed.wait(mutex);
    }
}

void Loader::reset_stats(const Locked & locked) {
    mutex.assert_held(locked);
    std::fill(read_by_layer.begin(), read_by_layer.end(), 0);
    counted    = {};
    ns_decoded = 0;
}

void Loader::stop() {
    {
        MutexLock lock(mutex);
        stopped = true;
    }
    wake();
}

} // namespace pyorch
