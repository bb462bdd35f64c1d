#include "replay/simulated.h"

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

SimulatedReader::SimulatedReader(Loader & loader, double read_seconds, double bytes_per_second,
    std::function<void(double)> waited) :
        Reader(loader), read_seconds(read_seconds), bytes_per_second(bytes_per_second), waited(std::move(waited)) {}

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
        ends  = at + read_seconds + (double) request.size / bytes_per_second;
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
