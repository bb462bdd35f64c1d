// Prompts on a device: each layer's experts pass through an area that has room for all of them (device/bank.h).
//
// While a layer computes, those of the next one that have slots, or are in host memory, go to the other area. That
// layer brings what has not come by then. An area is free when the layer that computed in it has been followed by
// another one: a layer's node asks when all before it is computed.
//
// One context at a time has the areas, from its ubatch's begin on: then the graph has no other way. It keeps them to
// the last layer, or where no output of that is wanted, to its next ubatch. Where another context has them, the
// processor computes the prompt, but for layers that come when they are free again.

#pragma once

#include "base/mutex.h"
#include "device/bank.h"
#include "residency/table.h"

#include <thread>
#include <utility>
#include <vector>

namespace pyorch {

// Calls upload(i, role, bytes) for each matrix of experts[i] that owner holds, in the order in which a layer passes
// that does not fit into host memory; and it is one thread that asks. True says that the bytes are read until the
// bank's next wait, which comes at once where what passes takes another's memory. By i: whether all of the expert could
// be read; where not, the decode fails when the layer gives its experts back.
template <typename Upload>
std::vector<uint8_t> bring_in_order(
    Table & table, DeviceBank & bank, Owner & owner, int layer, const std::vector<int> & experts, Upload upload) {
    const char marker = 0;
    owner.n_threads   = 1;
    std::vector<uint8_t> came(experts.size(), 1);
    for (int role = 0; role < (int) table.map.layers[layer].tensors.size(); ++role) {
        for (size_t i = 0; i < experts.size(); ++i) {
            const char * bytes = table.address(owner, layer, experts[i], role, true, &marker);
            if (!table.readable(bytes)) {
                came[i] = 0;
            } else if (upload(i, role, bytes) && owner.stream) {
                bank.wait_for_uploads();
            }
        }
    }
    return came;
}

class DeviceAreas {
public:
    // Of fewer tokens the processor computes sooner than their experts are uploaded, whatever the device.
    static constexpr int LEAST_TOKENS = 32;

    static constexpr int NO_TOKENS = INT32_MAX; // of as many there is none: the memory of areas is for slots

    // least_tokens: of a prompt that passes, above that. REQUIRES: the banks have their memory.
    DeviceAreas(Table & table, DeviceBanks & banks, int least_tokens);
    ~DeviceAreas();

    DeviceAreas(const DeviceAreas &)             = delete;
    DeviceAreas & operator=(const DeviceAreas &) = delete;

    // Whether a prompt of so many tokens passes through some, and whether a layer does.
    bool take(int n_tokens, bool decode) const { return !decode && n_tokens >= least_tokens && !areas.empty(); }
    bool take(int layer, int n_tokens, bool decode) const { return take(n_tokens, decode) && has_area(layer); }

    bool has_area(int layer) const { return index_of[layer] >= 0; }

    // Of those of the layer's device.
    int number(int layer) const { return layer % banks.of(layer).n_areas(); }

    // Whether a layer may come while the one before it is computed.
    bool may_come_ahead(int layer) const { return index_of[layer] >= 0 && index_of[layer] != index_of[layer - 1]; }

    // Whether the context has the areas: it gets them if nobody has.
    bool own(const void * context);

    // A layer comes that computes with these experts, ascending. slots: by expert, -1: it has none. Says which have to
    // be brought from host memory. False: another context has the areas.
    bool begin(const void * context, int layer, const std::vector<int> & experts, const std::vector<int> & slots,
        std::vector<int> & from_host);

    // Brings them, and what is in slots; owner holds the former, and computes with none of them itself.
    void bring(Owner & owner, int layer, const std::vector<int> & from_host);

    // Then the next layer begins to come: what has slots, by expert as above, from there, and all else that host memory
    // has. Those in slots stay there until stop_ahead(), or release().
    // REQUIRES: it may.
    void bring_ahead(int layer, const std::vector<int> & slots);

    // Nothing is brought ahead for the context any more.
    void stop_ahead(const void * context);

    // Whether the expert of the layer at hand could be read, once it was brought.
    bool has(int layer, int expert) const { return areas[index_of[layer]].there[expert] != 0; }

    // Until nothing comes ahead any more.
    void wait_idle();

    // The context computes nothing there.
    void release(const void * context);

private:
    struct Area {
        int                  layer = -1;
        std::vector<uint8_t> there = {}; // by expert
    };

    Table &          table;
    DeviceBanks &    banks;
    const int        least_tokens;
    Mutex            mutex;
    CondVar          changed;
    const void *     owner GUARDED_BY(mutex) = nullptr;
    int              ahead GUARDED_BY(mutex) = -1;     // the layer that is coming
    std::vector<int> ahead_slots GUARDED_BY(mutex);    // of its experts
    bool             busy GUARDED_BY(mutex)   = false; // one of its experts is on its way
    bool             ending GUARDED_BY(mutex) = false;
    std::thread      thread;

    // Without the mutex: the layer at hand uses them, which waits until the thread is not busy, or the busy thread.
    std::vector<Area> areas;      // of all devices
    std::vector<int>  index_of;   // by layer, in these; -1: none of its device
    std::vector<int>  slots_here; // of experts of the layer at hand, that are to be copied; -1: none

    Area & area_for(int layer);
    void   copy(int layer, const std::vector<int> & slots);
    void   work();
    void   copy_ahead(int layer) REQUIRES(mutex);
    void   upload_ahead(int layer) REQUIRES(mutex);
};

} // namespace pyorch
