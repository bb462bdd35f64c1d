#include "replay/simulated.h"

#include <algorithm>
#include <cmath>

namespace pyorch {
namespace {

class NothingRead : public Codec {
public:
    const char * decode(const ExpertTensor &, char * block, char *) const override { return block; }

    bool intact(const MoeLayer &, int, int, const char *) const override { return true; }

    bool recover(const MoeLayer &, int, int, int, const char *, const char *, char *) const override { return true; }
};

} // namespace

char SimulatedBank::nowhere;

const Codec & simulated_codec(Form) {
    static const NothingRead nothing;
    return nothing;
}

double SimulatedDisk::end_of(double begin, double seconds) const {
    if (pause_seconds <= 0) {
        return begin + seconds;
    }
    const double active = period_seconds - pause_seconds;
    const double since  = std::fmod(begin, period_seconds);
    const double done   = std::min(since, active) + seconds; // in active time, since the period began
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

// What all of a matrix was read of is decoded by the threads that are free first, step by step.
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

void SimulatedReader::wait(std::unique_lock<std::mutex> & lock, std::condition_variable &) {
    lock.unlock();
    if (at_work()) {
        waited(end_next());
    }
    lock.lock();
}

} // namespace pyorch
