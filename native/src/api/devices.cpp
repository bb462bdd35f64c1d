#include "api/api.h"
#include "api/structs.h"
#include "banks/device.h"

#include <cstdio>

using namespace pyorch;

extern "C" {

pyorch_status pyorch_find_device(const char * name, void ** device) {
    return guarded([&] { *device = find_device(name); });
}

pyorch_status pyorch_get_device(void * device, pyorch_device_info * info) {
    return guarded([&] {
        const auto         dev = (ggml_backend_dev_t) device;
        pyorch_device_info out = {};
        device_memory(dev, out.free_bytes, out.total_bytes);
        snprintf(out.name, sizeof(out.name), "%s", ggml_backend_dev_name(dev));
        snprintf(out.description, sizeof(out.description), "%s", ggml_backend_dev_description(dev));
        write_struct(info, "pyorch_device_info", out);
    });
}

} // extern "C"
