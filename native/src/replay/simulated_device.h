// Slots of a device in front of host memory, in simulated time. The same tables as with llama.cpp decide which experts
// are in slots and which ones the device computes (device/slot_pools.h), except that prompts fill no free slots here.
// The link is a model: it transfers one expert after another.

#pragma once

#include "pyorch-replay.h"

#include "device/slot_pools.h"
#include "residency/table.h"

#include <memory>

namespace pyorch {

class SimulatedDevice {
public:
    // REQUIRES: the table outlives it; device_bytes is above 0.
    SimulatedDevice(Table & table, const pyorch_replay_config & config);
    ~SimulatedDevice(); // removes its experts from the table

    SimulatedDevice(const SimulatedDevice &)             = delete;
    SimulatedDevice & operator=(const SimulatedDevice &) = delete;

    // Whether it uploads forecasts. Then begin() must be called after all forecasts of the layer.
    bool takes_forecasts() const { return ahead > 0; }

    // Orders a forecast for a layer's next pass. See DeviceTier::order.
    void order(
        const void * context, int layer, const std::vector<ForecastExpert> & forecast, double precision, double now);

    // Starts a layer at the time `now`, and sets `now` to the arrival of the layer's uploads. Returns which of the
    // layer's experts the device has or gets.
    DevicePass begin(const Visit & visit, int n_tokens, bool decode, double & now);

    // Uploads the pass's experts from host memory, then the later ones. Returns when this pass's have arrived. Sets
    // on_time[expert]: nonzero for each uploaded expert that the layer can compute with. owner: the layer's hold on experts in host memory.
    double bring(const Owner & owner, const DevicePass & pass, double now, std::vector<uint8_t> & on_time);

    void foresee(int layer, int expert, uint64_t next_use) { pools->seats.values.foresee(layer, expert, next_use); }
    SlotPools & table_of_slots() { return *pools; }

    void reset_counts();
    void add_counts(pyorch_replay_result & result) const;

private:
    // An upload that was ordered for a layer.
    struct Ordered {
        int    expert;
        bool   was_held; // by host memory; otherwise nothing is uploaded
        double begins;
        double ends;
    };

    Table &                                        table;
    const double                                   seconds_per_byte; // of the link
    uint64_t                                       slots_bytes;
    int                                            n_areas;
    std::unique_ptr<SlotPools>                     pools;
    std::vector<int>                               held;        // by the last layer
    int                                            layer = -1;  // the last layer
    std::vector<std::vector<std::pair<int, bool>>> coming;      // by layer: uploads, and whether host memory had them
    std::vector<double>                            arrival_of;  // by layer: the arrival of its uploads
    const int                                      ahead;       // experts of forecasts for a layer
    std::vector<std::vector<Ordered>>              ordered;     // by layer
    double                                         free_at = 0; // of the link
    uint64_t                                       bytes   = 0; // over the link

    double send(double now, uint64_t n_bytes);
    double settle_ahead(const void * context, const std::vector<int> & experts, double now);
};

} // namespace pyorch
