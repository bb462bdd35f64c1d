#include "residency/simulated.h"

#include "base/status.h"

#include <algorithm>
#include <cmath>

namespace pyorch {

char SimulatedBank::nowhere;

double SimulatedDisk::end_of(double begin, double seconds) const {
    if (pause_seconds <= 0) {
        return begin + seconds;
    }
    const double active = period_seconds - pause_seconds;
    const double since  = std::fmod(begin, period_seconds);
    const double done   = std::min(since, active) + seconds; // in active time since the begin of the period
    const double pauses = std::max(0.0, std::ceil(done / active) - 1);
    return begin - since + done + pauses * pause_seconds;
}

SimulatedReader::SimulatedReader(Loader & loader, const SimulatedDisk & disk, const SimulatedDecoders & decoders,
    std::function<void(double)> waited) :
        Reader(loader), disk(disk), decoders(decoders), waited(std::move(waited)), free_at(decoders.n),
        random(disk.seed) {}

double SimulatedReader::ends_at() const {
    return decoding.empty() || (busy && ends <= decoding.front().ends) ? ends : decoding.front().ends;
}

void SimulatedReader::run_until(double now) {
    while (at_work() && ends_at() <= now) {
        end_next();
    }
    if (!busy) {
        take(now);
    }
}

double SimulatedReader::end_next() {
    const double at = ends_at();
    if (busy && ends <= at) {
        busy = false;
        busy_seconds += at - began;
        if (loader.read(request, (int64_t) request.size, (uint64_t) std::llround((at - began) * 1e9))) {
            decode(request, at);
        }
    } else {
        const ReadRequest decoded = decoding.front().request;
        decoding.erase(decoding.begin());
        loader.decode(decoded);
    }
    if (!busy) {
        take(at);
    }
    return at;
}

void SimulatedReader::take(double at) {
    while (!busy && loader.try_next(request)) {
        if (!request.reads()) {
            if (loader.read(request, 0, 0)) {
                decode(request, at);
            }
            continue;
        }
        busy  = true;
        began = at;
        ends  = disk.end_of(at, (disk.read_seconds + (double) request.size / disk.bytes_per_second) * chance());
    }
}

double SimulatedReader::chance() { return disk.seed ? 0.5 + 0x1p-53 * (double) (random() >> 11) : 1; }

// The threads that are free first decode a matrix that was read whole, step by step.
void SimulatedReader::decode(const ReadRequest & read, double at) {
    const double seconds = (double) loader.bytes_to_decode(read) / decoders.bytes_per_second;
    if (seconds <= 0) {
        loader.decode(read);
        return;
    }
    const int n_steps = loader.steps_to_decode(read);
    double    last    = at;
    for (int step = 0; step < n_steps; ++step) {
        double & free = *std::min_element(free_at.begin(), free_at.end());
        free          = std::max(free, at) + seconds / n_steps;
        last          = std::max(last, free);
    }
    decode_seconds += seconds;
    const auto later =
        std::find_if(decoding.begin(), decoding.end(), [&](const Decoding & d) { return d.ends > last; });
    decoding.insert(later, { read, last });
}

void SimulatedReader::wait(Mutex & mutex, CondVar &) {
    MutexUnlock unlock(mutex);
    if (at_work()) {
        waited(end_next());
    }
}

namespace {

constexpr uint64_t READ_BYTES = 1u << 20;

SimulatedDisk disk_of(const ModelMap & map, double read_layers, uint64_t seed) {
    if (!(read_layers >= 0) || !std::isfinite(read_layers)) {
        throw Failure(
            PYORCH_INVALID, format("reading an expert cannot take %g times as long as a layer computes", read_layers));
    }
    double bytes = 0;
    for (const MoeLayer & layer : map.layers) {
        bytes += (double) layer.slot_bytes() / (double) map.layers.size();
    }
    return { 0, read_layers > 0 ? bytes / read_layers : INFINITY, 0, 0, seed };
}

std::unique_ptr<Bank> bank_of(const ModelMap & map, const pyorch_config & config) {
    return std::make_unique<SimulatedBank>(map, std::min(config.budget_bytes, map.slots_bytes()));
}

// Sizes of requests that do not depend on the file system or the kernel of this machine.
pyorch_config simulated(pyorch_config config) {
    config.direct_io  = 0;
    config.reader     = PYORCH_READER_THREADS;
    config.read_bytes = READ_BYTES;
    return config;
}

} // namespace

SimulatedCache::SimulatedCache(const ModelMap & map, const pyorch_config & config, double read_layers, uint64_t seed) :
        table(map, bank_of(map, config), open_source(map, simulated(config)), no_codec(), simulated(config)),
        disk(disk_of(map, read_layers, seed)), reader(table.loader(), disk, { 1, INFINITY }, [this](double ended) {
            mutex.assert_held(); // every call of the table and of the reader holds it
            now = std::max(now, ended);
        }) {}

SimulatedCache::~SimulatedCache() {
    table.forget(owner);
    while (reader.at_work()) {
        reader.end_next();
    }
}

void SimulatedCache::fill(int il, const int32_t * experts, int n) {
    MutexLock lock(mutex);
    table.prefetch(il, experts, n);
    do {
        reader.run_until(now);
        now = reader.at_work() ? std::max(now, reader.ends_at()) : now;
    } while (reader.at_work());
}

void SimulatedCache::look(int layer, std::vector<uint8_t> & resident, std::vector<uint8_t> & loading) {
    MutexLock lock(mutex);
    reader.run_until(now);
    table.resident(layer, resident, &loading);
}

void SimulatedCache::pass(const void * context, int layer, const Demand & demand, const std::vector<int> & deferred) {
    MutexLock lock(mutex);
    owner.context = context;
    table.acquire(owner, layer, demand);
    if (!deferred.empty()) {
        table.defer(layer, deferred);
    }
    // Matrix by matrix, in the order of the kernels.
    const int    n_roles = (int) table.map.layers[layer].tensors.size();
    const double each    = (double) demand.n_tokens / (n_roles * std::max<double>(1, (double) demand.experts.size()));
    reader.run_until(now);
    for (int role = 0; role < n_roles; ++role) {
        for (int expert : demand.experts) {
            wait_for(layer, expert, role);
            now += each;
            reader.run_until(now);
        }
    }
    if (demand.experts.empty()) {
        now += demand.n_tokens;
        reader.run_until(now);
    }
    table.release(owner);
    reader.run_until(now);
}

void SimulatedCache::forget(const void * context) {
    MutexLock lock(mutex);
    owner.context = context;
    table.forget(owner);
}

void SimulatedCache::wait_for(int layer, int expert, int role) {
    while (!table.address(owner, layer, expert, role, false) && reader.at_work()) {
        now = std::max(now, reader.ends_at());
        reader.run_until(now);
    }
}

} // namespace pyorch
