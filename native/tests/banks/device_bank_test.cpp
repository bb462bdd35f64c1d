// Memory of a device: claims about native/src/banks/device_bank.h, on a device whose memory is the host's.

#include "banks/device_bank.h"
#include "check.h"
#include "synthetic.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"

#include <algorithm>
#include <vector>

using namespace pyorch;

namespace {

constexpr size_t READ_ON = 64; // bytes behind a matrix that kernels read, times zero

// As ggml's CUDA wants of quantized tensors with odd rows.
ggml_backend_buffer_type_t memory_that_is_read_on() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type t = *ggml_backend_cpu_buffer_type();
        t.iface.get_alloc_size     = [](ggml_backend_buffer_type_t, const ggml_tensor * of) {
            return ggml_nbytes(of) + READ_ON;
        };
        return t;
    }();
    return &type;
}

ggml_backend_device device_that_reads_on() {
    ggml_backend_device device   = {};
    device.iface.get_name        = [](ggml_backend_dev_t) { return "made up"; };
    device.iface.get_props       = [](ggml_backend_dev_t, ggml_backend_dev_props * props) { *props = {}; };
    device.iface.get_buffer_type = [](ggml_backend_dev_t) { return memory_that_is_read_on(); };
    return device;
}

// A scale of such a block may be no number, whatever the bytes were for the other kind.
void areas_hold_nothing_of_another_kind() {
    const ModelMap map = synthetic_map(
        path, 4, 4, [](int) { return 64; }, 2, [](int layer) { return layer < 2 ? GGML_TYPE_Q8_0 : GGML_TYPE_Q5_0; });
    ggml_backend_device device = device_that_reads_on();
    DeviceBank          bank(map, &device);
    uint64_t            largest = 0;
    for (const MoeLayer & layer : map.layers) {
        largest = std::max(largest, layer.n_expert * layer.expert_bytes());
    }
    bank.allocate(3 * (largest + 3 * (READ_ON + 64)));
    CHECK(bank.n_areas() == 1);

    const std::vector<char> poison(largest, '\xff'), weights(largest, '\1');
    const auto              behind = [&](int layer, int role, int expert) {
        const ggml_tensor * t  = bank.area(0, layer, role);
        const auto *        at = (const char *) t->data + (expert + 1) * t->nb[2];
        return std::vector<char>(at, at + READ_ON);
    };
    const auto fill = [&](int layer, const std::vector<char> & with) {
        for (int role = 0; role < 3; ++role) {
            for (int expert = 0; expert < 4; ++expert) {
                bank.upload_to_area(0, layer, expert, role, with.data());
            }
        }
    };
    const std::vector<char> nothing(READ_ON, 0);
    fill(0, poison);
    for (int role = 0; role < 3; ++role) {
        for (int expert : { 1, 3 }) { // those between them are not wanted
            bank.upload_to_area(0, 2, expert, role, weights.data());
            CHECK(behind(2, role, expert) == nothing);
        }
    }
    // What the same kind left are numbers, and clearing them would take time.
    fill(2, weights);
    bank.upload_to_area(0, 3, 3, 0, poison.data());
    CHECK(behind(3, 0, 0) == std::vector<char>(READ_ON, '\1'));
}

} // namespace

int main(int argc, char ** argv) { return run(argc, argv, { areas_hold_nothing_of_another_kind }); }
