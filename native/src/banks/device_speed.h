// How fast a device takes experts and computes with them, and how fast the processor does.

#pragma once

#include "model/model_map.h"
#include "banks/device_rates.h"

#include "ggml-backend.h"

namespace pyorch {

// Measured now, in some tenths of a second, with matrices of the shapes and types of the model's first layer with
// experts. Takes memory for some of them on both sides meanwhile. n_threads: of the processor. Throws Failure where
// there is no such memory.
DeviceRates measure_device(const ModelMap & map, ggml_backend_dev_t device, int n_threads);

} // namespace pyorch
