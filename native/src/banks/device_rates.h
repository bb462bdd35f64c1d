// What an expert costs that a device lacks: uploaded first and computed there, or computed by the processor.
//
// From constants that are measured once and then stay (measure_device), and from counts: the same tokens are
// computed in the same places, however fast the machine is at the moment.

#pragma once

#include "model/model_map.h"

#include "ggml-backend.h"

#include <cstdint>
#include <vector>

namespace pyorch {

// Bytes of weights a second; all 0 where they are not known.
struct DeviceRates {
    double upload          = 0; // to the device
    double processor_first = 0; // that the processor computes one row with
    double processor_more  = 0; // each further row of the same expert
    double device_first    = 0; // the same of the device
    double device_more     = 0;

    // In the order of pyorch_measure_device.
    static DeviceRates of(const double * rates) { return { rates[0], rates[1], rates[2], rates[3], rates[4] }; }

    // All of them above 0, and so finite times.
    bool known() const;
};

// That a layer takes which computes with so many rows of experts that are on the device, and of others.
double layer_seconds(
    const DeviceRates & rates, uint64_t bytes, const std::vector<int> & rows, const std::vector<int> & lacking);

// Of the experts that a layer lacks on the device, how many should be uploaded before it is computed: those with most
// rows. The layer takes the uploads, one after another, and then what the slower of the two sides takes, each of which
// computes one expert after another. bytes: of one expert. rows: of those that are there; lacking: of the others, the
// most first. candidates: so many of the latter can be uploaded.
int uploads_that_pay(const DeviceRates & rates, uint64_t bytes, const std::vector<int> & rows,
    const std::vector<int> & lacking, int candidates);

// How fast a device takes experts and computes with them, and how fast the processor does: measured now, in some tenths
// of a second, with matrices of the shapes and types of the model's first layer with experts. Takes memory for some of
// them on both sides meanwhile. n_threads: of the processor. Throws Failure where there is no such memory.
DeviceRates measure_device(const ModelMap & map, ggml_backend_dev_t device, int n_threads);

} // namespace pyorch
