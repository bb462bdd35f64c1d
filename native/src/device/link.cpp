#include "device/link.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

namespace pyorch {
namespace {

constexpr int      N_LANES     = 4;
constexpr int      PIECES      = 4;       // of a matrix: the first is sent while the second is copied
constexpr uint64_t LEAST_BYTES = 4 << 10; // of a piece: a page
constexpr uint64_t MOST_BYTES  = 1 << 20; // larger ones are not faster

bool stages(ggml_backend_dev_t device) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    if (!props.caps.async || !props.caps.host_buffer || !ggml_backend_dev_host_buffer_type(device)) {
        return false;
    }
    const char * const told = getenv("PYORCH_UPLOADS");
    if (told && *told) {
        return strcmp(told, "staged") == 0;
    }
    const std::string backend = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
    return backend == "CUDA" || backend == "ROCm" || backend == "MUSA";
}

} // namespace

bool reads_host_memory(ggml_backend_dev_t device) {
    return stages(device) && strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), "CUDA") == 0;
}

DeviceLink::DeviceLink(ggml_backend_dev_t device, uint64_t largest, PageLocks * locks) :
        piece_bytes(std::clamp(largest / PIECES, LEAST_BYTES, MOST_BYTES) / LEAST_BYTES * LEAST_BYTES), locks(locks) {
    for (int i = 0; i < N_LANES && stages(device); ++i) {
        auto lane = std::make_unique<Lane>();
        lane->queue.reset(ggml_backend_dev_init(device, nullptr));
        lane->piece.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_host_buffer_type(device), piece_bytes));
        if (!lane->queue || !lane->piece) {
            break; // use the existing lanes
        }
        lane->sent.reset(ggml_backend_event_new(device));
        lanes.push_back(std::move(lane));
    }
    if (locks) {
        locks->on_unlock(this, [this] { wait(); });
    }
}

DeviceLink::~DeviceLink() {
    if (locks) {
        locks->on_unlock(this, {});
    }
    wait();
}

bool DeviceLink::send(ggml_tensor * to, uint64_t offset, const char * bytes, uint64_t n) {
    if (lanes.empty()) {
        ggml_backend_tensor_set(to, bytes, offset, n);
        return false;
    }
    const auto read_there = [&](const char * from, uint64_t n_part) {
        Lane &    lane = *lanes[next++ % lanes.size()];
        MutexLock lock(lane.mutex);
        begin(lane, to, offset + (from - bytes), from, n_part);
    };
    if (locks && locks->read(bytes, n, read_there)) {
        return true;
    }
    for (uint64_t begin = 0; begin < n; begin += piece_bytes) {
        const uint64_t n_piece = std::min(piece_bytes, n - begin);
        Lane &         lane    = *lanes[next++ % lanes.size()];
        MutexLock      lock(lane.mutex);
        finish(lane);
        void * const piece = ggml_backend_buffer_get_base(lane.piece.get());
        memcpy(piece, bytes + begin, n_piece);
        this->begin(lane, to, offset + begin, (const char *) piece, n_piece);
    }
    return false;
}

void DeviceLink::copy(ggml_tensor * from, ggml_tensor * to) {
    if (lanes.empty()) {
        ggml_backend_tensor_copy(from, to);
        return;
    }
    Lane &    lane = *lanes[next++ % lanes.size()];
    MutexLock lock(lane.mutex);
    ggml_backend_tensor_copy_async(lane.queue.get(), lane.queue.get(), from, to);
    lane.under_way = true;
}

void DeviceLink::begin(Lane & lane, ggml_tensor * to, uint64_t offset, const char * bytes, uint64_t n) {
    ggml_backend_tensor_set_async(lane.queue.get(), to, bytes, offset, n);
    lane.under_way = true;
}

void DeviceLink::wait() {
    for (const auto & lane : lanes) {
        MutexLock lock(lane->mutex);
        finish(*lane);
    }
}

// Some backends keep the state of an event or an instance until both were waited for.
void DeviceLink::finish(Lane & lane) {
    if (lane.under_way && lane.sent) {
        ggml_backend_event_record(lane.sent.get(), lane.queue.get());
        ggml_backend_event_synchronize(lane.sent.get());
    }
    if (lane.under_way) {
        ggml_backend_synchronize(lane.queue.get());
    }
    lane.under_way = false;
}

} // namespace pyorch
