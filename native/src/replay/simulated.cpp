#include "replay/simulated.h"

#include <algorithm>
#include <cmath>

namespace pyorch {
namespace {

class NothingRead : public Codec {
public:
    const char * decode(const ExpertTensor &, char * block, char *) const override {
        return block;
    }

    bool intact(const MoeLayer &, int, int, const char *) const override {
        return true;
    }
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

SimulatedReader::SimulatedReader(Loader & loader, const SimulatedDisk & disk, std::function<void(double)> waited) :
        Reader(loader), disk(disk), waited(std::move(waited)) {}

void SimulatedReader::run_until(double now) {
    while (busy && ends <= now) {
        end_read();
    }
    if (!busy) {
        take(now);
    }
}

double SimulatedReader::end_read() {
    const double at = ends;
    busy = false;
    busy_seconds += at - began;
    loader.finish(request, (int64_t) request.size, (uint64_t) std::llround((at - began) * 1e9));
    take(at);
    return at;
}

void SimulatedReader::take(double at) {
    if (loader.try_next(request)) {
        busy  = true;
        began = at;
        ends  = disk.end_of(at, disk.read_seconds + (double) request.size / disk.bytes_per_second);
    }
}

void SimulatedReader::wait(std::unique_lock<std::mutex> & lock, std::condition_variable &) {
    lock.unlock();
    if (busy) {
        waited(end_read());
    }
    lock.lock();
}

} // namespace pyorch
