// The tier above host memory: experts in slots of a device (device/bank.h), their residency (device/slot_pools.h), and
// their uploads. Several devices divide the layers: a pool of slots belongs to one device.
//
// The device computes the experts in its slots. The processor computes all others from host memory. A missing expert
// that is worth more than a resident one is uploaded after that: it serves the next pass of its layer, and no earlier
// one, however soon the upload ends. So the tokens alone decide what is computed where. With PYORCH_UPLOAD it is
// uploaded first and then computed on the device.
//
// A few experts of a forecast may be uploaded before their layer (device/ordered.cpp). If the layer uses one, the device
// computes it: it waits for a running upload, and uploads first if none has begun. Unused ones are dropped.
//
// A prompt uses areas instead: device/areas.h.
//
// When a slot may be overwritten: a context holds the experts of its latest layer on the device. When the next layer's
// node runs, which needs the results of that layer, the device is done with them. For a prompt it also holds the
// experts of the next layer, which are copied to an area meanwhile.

#pragma once

#include "base/mutex.h"
#include "device/bank.h"
#include "device/host_copies.h"
#include "device/slot_pools.h"
#include "residency/table.h"
#include "device/areas.h"
#include "routing/routed_batch.h"

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <thread>

namespace pyorch {

// The experts that a context holds on the device, by layer. For a prompt also experts of the next layer, which are
// copied from their slots to an area before it begins.
struct DeviceHold {
    std::vector<std::pair<int, int>> experts = {};
};

// Returns the devices of an engine's settings.
std::vector<ggml_backend_dev_t> devices_of(const pyorch_config & config);

class DeviceTier : public Tier {
public:
    // REQUIRES: the table and its reader outlive it.
    // locks: of the table's memory, or null.
    DeviceTier(Table & table, const pyorch_config & config, const std::shared_ptr<PageLocks> & locks = nullptr);
    ~DeviceTier() override;

    DeviceTier(const DeviceTier &)             = delete;
    DeviceTier & operator=(const DeviceTier &) = delete;

    // Sets the budget of one device by its number. Throws Failure after memory was allocated.
    void set_budget(int device, uint64_t bytes);

    // Allocates the memory, at the first call. landing_bytes: the most bytes of a layer's rows from the processor.
    void open(uint64_t landing_bytes);

    // Whether all experts have slots, once it is open: then no other side computes any.
    bool has_room_for_all() const { return all_fit; }

    // Whether each expert of a layer is in the slot of its number and stays there, so that graphs need not ask.
    bool is_whole(int layer) const { return !whole.empty() && whole[layer] != 0; }

    DeviceBanks banks;
    HostCopies  host_copies;

    // Returns the bank of the layer's device.
    DeviceBank & bank(int layer) const { return banks.of(layer); }

    // Decides which of batch.wanted the device computes and, unless it overlaps, what is uploaded. visit: of
    // batch.asked. hold: of the context; releases what it held.
    void choose(DeviceHold & hold, RoutedBatch & batch, const Visit & visit);

    // Decides what is uploaded, if uploads serve only the next time.
    void replace(RoutedBatch & batch, const Visit & visit);

    // Whether uploads serve only the next time: nothing must be uploaded before a layer of a few tokens is computed.
    bool brings_behind() const { return misses == PYORCH_PROCESSOR && n_ahead == 0; }

    void set_policy(pyorch_policy policy) override;

    // Implements pyorch_set_device_limits. Throws Failure.
    void set_limits(int layer, int min, int max) override;

    // Whether forecasts cause uploads. If so, choose() runs after the layer's forecasts are complete.
    bool takes_forecasts() const { return n_ahead > 0 && by_forecasts; }

    // Turns uploads by forecasts on or off. Forecasts that depend on time cause none, because the tokens alone must
    // decide what is computed where.
    void set_by_forecasts(bool on) { by_forecasts = on; }

    // Receives a forecast of a layer's next pass in a context, the likeliest first. See SlotPools. Any thread.
    void order(const void * context, int layer, const std::vector<ForecastExpert> & forecast, double precision);

    // Drops orders of a context that is gone, or that passes one layer without the device.
    void forget(const void * context, int layer = -1);

    // Uploads what is to come, which host memory has or is loading. Waits for uploads that the layer needs.
    // next_passes: the next layer of a prompt passes through an area too.
    void bring(Owner & owner, DeviceHold & hold, RoutedBatch & batch, bool next_passes = true);

    // Releases the experts; the device computes with them no more.
    void release(DeviceHold & hold);

    // Releases only its areas.
    void release_areas(DeviceHold & hold) { areas->release(&hold); }

    // Whether a ubatch of so many tokens passes through areas.
    bool has_areas_for(int n_tokens, bool decode) const { return areas && areas->serve(n_tokens, decode); }

    // Whether the context has the areas; it gets them if they are free.
    bool take_areas(const DeviceHold & hold) { return areas->own(&hold); }

    // Returns the last of these layers, ascending, of which prompts pass through an area; -1: none.
    int last_with_area(const std::vector<int> & layers) const;

    // Whether a graph of so many tokens computes in areas, and the tensor that it multiplies with there.
    bool takes_area(int layer, int n_tokens, bool decode) const { return areas->serve(layer, n_tokens, decode); }
    ggml_tensor * area(int layer, int role) const { return bank(layer).area(areas->number(layer), layer, role); }

    void mark(int layer, std::vector<uint8_t> & mask) override;

    // Counts a token that passed a whole layer without asking.
    void count_unasked(int layer, int n_used);

    void add_stats(int layer, pyorch_stats & stats) override;
    void reset_stats() override;

    // Waits until no upload runs.
    void wait_idle();

private:
    // An upload for a later layer.
    struct Upload {
        int   layer;
        int   expert;
        int   slot;
        Owner owner   = {}; // holds the expert in host memory
        bool  begun   = false;
        bool  ended   = false;
        bool  arrived = false;
        bool  ahead   = false; // before its layer: held only during the upload
        bool  dropped = false; // no longer needed
    };

    Table &                    table;
    const pyorch_device_misses misses;
    const int                  n_ahead;      // experts of a forecast to upload, for each layer
    const int                  least_tokens; // of a prompt that passes through areas
    std::atomic<bool>          by_forecasts{ true };
    std::atomic<bool>          all_fit{ false };

    Mutex                      mutex;
    CondVar                    wanted;
    CondVar                    ended;
    pyorch_policy              policy GUARDED_BY(mutex);
    std::vector<uint64_t>      budgets GUARDED_BY(mutex);                    // by device
    std::unique_ptr<SlotPools> pools GUARDED_BY(mutex) PT_GUARDED_BY(mutex); // null before open()
    bool                       opened GUARDED_BY(mutex)   = false;
    bool                       stopping GUARDED_BY(mutex) = false;
    std::list<Upload>          uploads GUARDED_BY(mutex); // running, or not yet seen by their layer
    std::deque<Upload *>       queue GUARDED_BY(mutex);
    std::thread                uploader;

    // open() sets these before the first context computes. They are read without the mutex.
    std::unique_ptr<DeviceAreas> areas; // null before open()
    std::vector<uint8_t>         whole; // by layer

    void                give_back(DeviceHold & hold) REQUIRES(mutex);
    std::vector<int>    hold_slots(DeviceHold & hold, int layer, const std::vector<int> & experts) REQUIRES(mutex);
    void                tell_moved() REQUIRES(mutex);
    bool                load_whole(int layer) REQUIRES(mutex);
    std::vector<double> learn(const RoutedBatch & batch, const Visit & visit);
    bool                lets_nothing_come(const RoutedBatch & batch) const REQUIRES(mutex);
    void choose_for_area(DeviceHold & hold, RoutedBatch & batch, const std::vector<int> & experts) REQUIRES(mutex);
    std::vector<int> places_of(const RoutedBatch & batch);
    void             arrive(
        DeviceHold & hold, RoutedBatch & batch, const std::vector<int> & slots, const std::vector<uint8_t> & whole);
    void bring_behind(const Owner & owner, RoutedBatch & batch);
    void keep_passing(const RoutedBatch & batch);
    void bring_next(DeviceHold & hold, int layer);
    void settle(int layer) REQUIRES(mutex);
    void settle_ahead(const void * context, int layer, const std::vector<int> & experts) REQUIRES(mutex);
    bool is_written(int layer, int slot) const REQUIRES(mutex);
    void count_computed(const RoutedBatch & batch);
    void work();
    bool upload(const Owner & owner, int layer, int expert, int slot, bool waits = false);
};

} // namespace pyorch
