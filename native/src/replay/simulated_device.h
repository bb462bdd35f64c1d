// Slots of a device in front of host memory, in simulated time: who is there and what is computed there are decided by
// the table that decides it beside llama.cpp (device/slot_pools.h), but that prompts fill no free slots here. What
// is modelled is the link: it takes one expert after another.

#pragma once

#include "pyorch-replay.h"

#include "device/slot_pools.h"
#include "residency/table.h"

#include <memory>

namespace pyorch {

class SimulatedDevice {
public:
    // REQUIRES: the table outlives it, and device_bytes above 0.
    SimulatedDevice(Table & table, const pyorch_replay_config & config);
    ~SimulatedDevice(); // and the table forgets who was there

    SimulatedDevice(const SimulatedDevice &)             = delete;
    SimulatedDevice & operator=(const SimulatedDevice &) = delete;

    // Whether forecasts say what comes. If so, begin() is called when those of the layer are all there.
    bool takes_forecasts() const { return ahead > 0; }

    // A forecast of a layer's next pass, at a time. See DeviceTier::order.
    void order(
        const void * context, int layer, const std::vector<ForecastExpert> & forecast, double precision, double now);

    // A layer comes at a time, which becomes that at which all is there that was to come for it. Says which of the
    // experts that its router chose the device has or gets.
    DevicePass begin(const Visit & visit, int n_tokens, bool decode, double & now);

    // What comes for that layer goes over the link, from host memory, which has it; returns when it is there. What
    // comes behind that follows. True of an expert: it came. owner: what the layer holds in host memory.
    double bring(const Owner & owner, const DevicePass & pass, double now, std::vector<uint8_t> & came);

    void foresee(int layer, int expert, uint64_t next_use) { pools->seats.values.foresee(layer, expert, next_use); }
    SlotPools & table_of_slots() { return *pools; }

    void reset_counts();
    void add_counts(pyorch_replay_result & result) const;

private:
    // What is ordered for a layer, and comes over the link.
    struct Ordered {
        int    expert;
        bool   was_held; // by host memory: else nothing comes
        double begins;
        double ends;
    };

    Table &                                        table;
    const double                                   seconds_per_byte; // of the link
    uint64_t                                       slots_bytes;
    int                                            n_areas;
    std::unique_ptr<SlotPools>                     pools;
    std::vector<int>                               held;        // of the layer that came last
    int                                            layer = -1;  // that is
    std::vector<std::vector<std::pair<int, bool>>> coming;      // by layer: experts, and whether host memory had them
    std::vector<double>                            there_at;    // by layer: when they are there
    const int                                      ahead;       // experts of forecasts a layer
    std::vector<std::vector<Ordered>>              ordered;     // by layer
    double                                         free_at = 0; // the link
    uint64_t                                       bytes   = 0; // that went over it

    double send(double now, uint64_t n_bytes);
    double settle_ahead(const void * context, const std::vector<int> & experts, double now);
};

} // namespace pyorch
