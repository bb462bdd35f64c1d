#include "device/landings.h"

#include "device/link.h"

namespace pyorch {

DeviceLandings::DeviceLandings(ggml_backend_dev_t device) : reads_host(reads_host_memory(device)), device(device) {}

void DeviceLandings::set_limit(uint64_t bytes) {
    MutexLock lock(mutex);
    limit = bytes;
}

ggml_tensor * DeviceLandings::Landing::tensor(
    ggml_context * ctx, ggml_type type, const int64_t * ne, void * data) const {
    ggml_tensor * made = ggml_new_tensor(ctx, type, GGML_MAX_DIMS, ne);
    made->buffer       = rows->buffer;
    made->data         = data;
    return made;
}

DeviceLandings::Piece * DeviceLandings::find(int64_t n, int64_t n_numbers) {
    for (Piece & piece : pieces) {
        if (!piece.taken && (piece.host != nullptr) == (n_numbers > 0) && piece.holds(n, n_numbers)) {
            piece.taken = true;
            return &piece;
        }
    }
    return nullptr;
}

// In the device's memory.
bool DeviceLandings::allocate(Piece & piece, int64_t n) {
    piece.ctx.reset(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
    piece.rows = ggml_new_tensor_1d(piece.ctx.get(), GGML_TYPE_F32, n);
    ggml_set_name(piece.rows, "pyorch_landing");
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    if (used_bytes + ggml_backend_buft_get_alloc_size(type, piece.rows) > limit) {
        return false;
    }
    piece.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(piece.ctx.get(), type));
    if (!piece.buffer) {
        return false;
    }
    used_bytes += ggml_backend_buffer_get_size(piece.buffer.get());
    ggml_backend_buffer_clear(piece.buffer.get(), 0);
    ggml_backend_buffer_set_usage(piece.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    return true;
}

const DeviceLandings::Landing * DeviceLandings::take(int64_t n) {
    MutexLock lock(mutex);
    if (const Piece * found = find(n, 0)) {
        return found;
    }
    Piece made    = {};
    made.n_floats = n;
    if (!allocate(made, n)) {
        return nullptr;
    }
    pieces.push_back(std::move(made));
    return &pieces.back();
}

const DeviceLandings::Landing * DeviceLandings::take_zero_copy(int64_t n, int64_t n_numbers) {
    MutexLock lock(mutex);
    if (!reads_host) {
        return nullptr;
    }
    if (const Piece * found = find(n, n_numbers)) {
        return found;
    }
    Piece made = {};
    made.locked.reset(ggml_backend_buft_alloc_buffer(
        ggml_backend_dev_host_buffer_type(device), n * sizeof(float) + n_numbers * sizeof(int32_t)));
    // If the operating system locks no more, ggml gives memory that is not locked.
    const bool is_locked =
        made.locked && ggml_backend_buffer_get_type(made.locked.get()) == ggml_backend_dev_host_buffer_type(device);
    if (!is_locked || !allocate(made, 1)) {
        return nullptr;
    }
    made.host      = (float *) ggml_backend_buffer_get_base(made.locked.get());
    made.numbers   = (int32_t *) (made.host + n);
    made.n_floats  = n;
    made.n_numbers = n_numbers;
    pieces.push_back(std::move(made));
    return &pieces.back();
}

void DeviceLandings::give_back(const Landing * landing) {
    MutexLock lock(mutex);
    for (Piece & piece : pieces) {
        piece.taken = piece.taken && &piece != landing;
    }
}

} // namespace pyorch
