// The tier above host memory: experts in slots of a device (device/bank.h), who is there
// (device/slot_pools.h), and what moves them. Of several devices, which divide the layers: a pool of slots is one
// device's, and all else is the same.
//
// What is there is computed there. What is not is computed by the processor, from host memory, and comes behind that if
// it is worth more than what must go for it: it serves when its layer comes again, and not before, however soon it
// came. So what is computed where follows from the tokens alone. Or it comes first and is computed there, too
// (PYORCH_UPLOAD).
//
// What a forecast names may be ordered before its layer comes, a few experts each (device/guests.cpp). If the
// layer computes with one, the device does: it waits where that is under way, and brings it first where nothing was
// done. What the layer does not want is left.
//
// A prompt takes another way: device/areas.h.
//
// When a slot may be overwritten: a context holds the experts that its latest layer computes with on the device. When
// the next layer's node asks, which needs what that one computed, the device is done with them. Of a prompt it holds
// those of the next layer, too, which are copied to an area meanwhile.

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

// What a context computes with on the device: layers and experts. Of a prompt, experts of the next layer, too, which are
// copied from their slots to an area before it comes.
struct DeviceHold {
    std::vector<std::pair<int, int>> experts = {};
};

// As the settings of an engine name them.
std::vector<ggml_backend_dev_t> devices_of(const pyorch_config & config);

class DeviceTier : public Tier {
public:
    // REQUIRES: the table outlives it, and its reader.
    // locks: of the table's memory, null: none.
    DeviceTier(Table & table, const pyorch_config & config, const std::shared_ptr<PageLocks> & locks = nullptr);
    ~DeviceTier() override;

    DeviceTier(const DeviceTier &)             = delete;
    DeviceTier & operator=(const DeviceTier &) = delete;

    // Of one of the devices, by its number. Throws Failure once memory was taken.
    void set_budget(int device, uint64_t bytes);

    // The rows of a layer that the processor computes take so many bytes at most: takes the memory, the first time.
    void open(uint64_t landing_bytes);

    // Whether all experts have their places there, once it is open: then no other side computes any.
    bool has_room_for_all() const { return all_fit; }

    // Whether each expert of a layer is in the slot of its number, and stays there, and graphs need not ask.
    bool is_whole(int layer) const { return !whole.empty() && whole[layer] != 0; }

    DeviceBanks banks;
    HostCopies  host_copies;

    // That of the layer's device.
    DeviceBank & bank(int layer) const { return banks.of(layer); }

    // Says which of batch.wanted are computed on the device, and, unless it overlaps, what is to come there. visit: of
    // batch.asked. hold: of the context, what it held is given back.
    void choose(DeviceHold & hold, RoutedBatch & batch, const Visit & visit);

    // What is to come, where that serves the next time only.
    void replace(RoutedBatch & batch, const Visit & visit);

    // Whether it does: nothing has to come before a layer of a few tokens is computed.
    bool brings_behind() const { return misses == PYORCH_PROCESSOR && n_ahead == 0; }

    void set_policy(pyorch_policy policy) override;

    // See pyorch_set_device_limits. Throws Failure.
    void set_limits(int layer, int min, int max) override;

    // Whether forecasts say what comes. If so, choose() is called when those of the layer are all there.
    bool takes_forecasts() const { return n_ahead > 0 && by_forecasts; }

    // From now on. Forecasts that are made as time allows say nothing: what is computed where must not depend on that.
    void set_by_forecasts(bool on) { by_forecasts = on; }

    // A forecast of a layer's next pass in a context, the likeliest first. See SlotPools. Any thread.
    void order(const void * context, int layer, const std::vector<ForecastExpert> & forecast, double precision);

    // The context is gone, or passes one layer without the device: what was ordered for it is not wanted any more.
    void forget(const void * context, int layer = -1);

    // The host has, or is getting, what is to come. Waits for what comes before the layer is computed. next_passes: the
    // next layer of a prompt passes through an area, too.
    void bring(Owner & owner, DeviceHold & hold, RoutedBatch & batch, bool next_passes = true);

    // Nothing is computed there any more.
    void release(DeviceHold & hold);

    // In its areas, at least.
    void release_areas(DeviceHold & hold) { areas->release(&hold); }

    // Whether a ubatch of so many tokens is a prompt that may pass through areas; and whether the context has them: it
    // gets them where no other has.
    bool has_areas_for(int n_tokens, bool decode) const { return areas && areas->take(n_tokens, decode); }
    bool take_areas(const DeviceHold & hold) { return areas->own(&hold); }

    // Of these layers, ascending, the last one of which prompts pass through an area; -1: none.
    int last_with_area(const std::vector<int> & layers) const;

    // Whether a graph of so many tokens computes in areas, and the tensor that it multiplies with there.
    bool takes_area(int layer, int n_tokens, bool decode) const { return areas->take(layer, n_tokens, decode); }
    ggml_tensor * area(int layer, int role) const { return bank(layer).area(areas->number(layer), layer, role); }

    void mark(int layer, std::vector<uint8_t> & mask) override;

    // A token passed a whole layer without asking.
    void count_unasked(int layer, int n_used);

    void add_stats(int layer, pyorch_stats & stats) override;
    void reset_stats() override;

    // Until nothing comes any more.
    void wait_idle();

private:
    // What comes behind the computing.
    struct Upload {
        int   layer;
        int   expert;
        int   slot;
        Owner owner   = {}; // holds it in host memory
        bool  begun   = false;
        bool  ended   = false;
        bool  came    = false;
        bool  ahead   = false; // of its layer: it is held while it is uploaded only
        bool  dropped = false; // nobody wants it any more
    };

    Table &                    table;
    const pyorch_device_misses misses;
    const int                  n_ahead;      // experts of forecasts a layer
    const int                  least_tokens; // of a prompt that passes through areas
    std::atomic<bool>          by_forecasts{ true };
    std::atomic<bool>          all_fit{ false };

    Mutex                      mutex;
    CondVar                    wanted;
    CondVar                    ended;
    pyorch_policy              policy GUARDED_BY(mutex);
    std::vector<uint64_t>      budgets GUARDED_BY(mutex);                    // by device
    std::unique_ptr<SlotPools> pools GUARDED_BY(mutex) PT_GUARDED_BY(mutex); // null until there is memory
    bool                       opened GUARDED_BY(mutex)   = false;
    bool                       stopping GUARDED_BY(mutex) = false;
    std::list<Upload>          uploads GUARDED_BY(mutex); // under way, or not yet seen by their layer
    std::deque<Upload *>       queue GUARDED_BY(mutex);
    std::thread                uploader;

    // open() sets these before the first context computes. They are read without the mutex.
    std::unique_ptr<DeviceAreas> areas; // null until there is memory
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
        DeviceHold & hold, RoutedBatch & batch, const std::vector<int> & slots, const std::vector<uint8_t> & came);
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
