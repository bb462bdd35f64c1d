// Speed of a device's uploads and computing, compared with the processor's. Advice uses it.

#pragma once

#include "model/model_map.h"

#include "ggml-backend.h"

namespace pyorch {

// Bytes of weights a second.
struct DeviceRates {
    double upload          = 0; // to the device
    double processor_first = 0; // the processor, for the first row
    double processor_more  = 0; // each further row of the same expert
    double device_first    = 0; // the device, for the first row
    double device_more     = 0;
};

// Measures a device and the processor now, in some tenths of a second, with matrices of the shapes and types of the
// model's first layer with experts. Allocates memory for some of them on both sides meanwhile. n_threads: of the
// processor. Throws Failure if that memory is not free.
DeviceRates measure_device(const ModelMap & map, ggml_backend_dev_t device, int n_threads);

} // namespace pyorch
