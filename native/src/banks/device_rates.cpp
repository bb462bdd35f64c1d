#include "banks/device_rates.h"

#include <algorithm>
#include <cmath>

namespace pyorch {

bool DeviceRates::known() const {
    const double all[] = { upload, processor_first, processor_more, device_first, device_more };
    return std::all_of(std::begin(all), std::end(all), [](double rate) { return rate > 0; });
}

static double seconds(double first, double more, uint64_t bytes, int n_rows) {
    return (double) bytes / first + (n_rows - 1) * (double) bytes / more;
}

double layer_seconds(
    const DeviceRates & rates, uint64_t bytes, const std::vector<int> & rows, const std::vector<int> & lacking) {
    double device = 0, processor = 0;
    for (int n : rows) {
        device += seconds(rates.device_first, rates.device_more, bytes, n);
    }
    for (int n : lacking) {
        processor += seconds(rates.processor_first, rates.processor_more, bytes, n);
    }
    return std::max(device, processor);
}

int uploads_that_pay(const DeviceRates & rates, uint64_t bytes, const std::vector<int> & rows,
    const std::vector<int> & lacking, int candidates) {
    double device = 0, processor = 0, uploading = 0;
    for (int n : rows) {
        device += seconds(rates.device_first, rates.device_more, bytes, n);
    }
    for (int n : lacking) {
        processor += seconds(rates.processor_first, rates.processor_more, bytes, n);
    }
    int    best  = 0;
    double least = std::max(device, processor);
    for (int i = 0; i < candidates; ++i) {
        uploading += (double) bytes / rates.upload;
        device += seconds(rates.device_first, rates.device_more, bytes, lacking[i]);
        processor -= seconds(rates.processor_first, rates.processor_more, bytes, lacking[i]);
        const double all = uploading + std::max(device, processor);
        if (all < least) {
            least = all;
            best  = i + 1;
        }
    }
    return best;
}

} // namespace pyorch
