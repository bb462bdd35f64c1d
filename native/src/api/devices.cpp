#include "api/api.h"
#include "device/devices.h"
#include "device/rates.h"
#include "pyorch-devices.h"

#include <algorithm>
#include <iterator>

using namespace pyorch;

extern "C" {

pyorch_status pyorch_find_device(const char * name, void ** device) {
    return guarded([&] { *device = find_device(name); });
}

pyorch_status pyorch_next_device(void * after, void ** device) {
    return guarded([&] { *device = next_device((ggml_backend_dev_t) after); });
}

pyorch_status pyorch_get_device(void * device, pyorch_device_info * info) {
    return guarded([&] {
        const auto         dev = (ggml_backend_dev_t) device;
        pyorch_device_info out = {};
        device_memory(dev, out.free_bytes, out.total_bytes);
        out.shares_memory = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_IGPU;
        copy_text(out.name, ggml_backend_dev_name(dev));
        copy_text(out.buffers, ggml_backend_buft_name(ggml_backend_dev_buffer_type(dev)));
        copy_text(out.description, ggml_backend_dev_description(dev));
        *info = out;
    });
}

pyorch_status pyorch_measure_device(const pyorch_model_map * map, void * device, int32_t n_threads, double * rates) {
    return guarded([&] {
        if (map->map.layers.empty() || n_threads < 1) {
            throw Failure(PYORCH_INVALID, "a device is measured with experts, and beside one thread at least");
        }
        const DeviceRates of    = measure_device(map->map, (ggml_backend_dev_t) device, n_threads);
        const double      all[] = { of.upload, of.processor_first, of.processor_more, of.device_first, of.device_more };
        std::copy(std::begin(all), std::end(all), rates);
    });
}

} // extern "C"
