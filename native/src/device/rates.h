// How fast a device takes experts and computes with them, beside the processor: what advice goes by.

#pragma once

#include "model/model_map.h"

#include "ggml-backend.h"

namespace pyorch {

// Bytes of weights a second.
struct DeviceRates {
    double upload          = 0; // to the device
    double processor_first = 0; // that the processor computes one row with
    double processor_more  = 0; // each further row of the same expert
    double device_first    = 0; // the same of the device
    double device_more     = 0;
};

// How fast a device takes experts and computes with them, and how fast the processor does: measured now, in some tenths
// of a second, with matrices of the shapes and types of the model's first layer with experts. Takes memory for some of
// them on both sides meanwhile. n_threads: of the processor. Throws Failure where there is no such memory.
DeviceRates measure_device(const ModelMap & map, ggml_backend_dev_t device, int n_threads);

} // namespace pyorch
