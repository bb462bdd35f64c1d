// Prompts on a device: the experts of each layer pass through an area with room for all of them (device/bank.h).
//
// While a layer computes, the experts of the next layer that have slots, or are in host memory, are copied to the other
// area. The next layer brings the rest. An area is free once the next layer's node asks, since all nodes before it have
// been computed then.
//
// One context at a time has the areas, from the begin of its ubatch: then its graph passes through them. It keeps them
// until the last layer has been computed, or, if that layer's output is not used, until its next ubatch. If another
// context has the areas, the processor computes the prompt, except for layers that come when the areas are free again.

#pragma once

#include "base/mutex.h"
#include "device/bank.h"
#include "residency/table.h"

#include <thread>
#include <utility>
#include <vector>

namespace pyorch {

// Calls upload(i, role, bytes) for each matrix of experts[i] that owner holds, in the order of a streamed layer; one
// thread asks. True: the bytes are read until the bank's next wait, which comes at once if the stream needs the memory.
// Returns, by i, whether the whole expert could be read; if not, the decode fails when the layer releases its experts.
template <typename Upload>
std::vector<uint8_t> bring_in_order(
    Table & table, DeviceBank & bank, Owner & owner, int layer, const std::vector<int> & experts, Upload upload) {
    const char marker = 0;
    owner.n_threads   = 1;
    std::vector<uint8_t> whole(experts.size(), 1);
    for (int role = 0; role < (int) table.map.layers[layer].tensors.size(); ++role) {
        for (size_t i = 0; i < experts.size(); ++i) {
            const char * bytes = table.address(owner, layer, experts[i], role, true, &marker);
            if (!table.readable(bytes)) {
                whole[i] = 0;
            } else if (upload(i, role, bytes) && owner.stream) {
                bank.wait_for_uploads();
            }
        }
    }
    return whole;
}

class DeviceAreas {
public:
    // With fewer tokens, the processor computes sooner than their experts are uploaded, on any device.
    static constexpr int LEAST_TOKENS = 32;

    static constexpr int NO_TOKENS = INT32_MAX; // no prompt is this long: areas get no memory

    // least_tokens: of prompts that use areas. REQUIRES: the banks have their memory.
    DeviceAreas(Table & table, DeviceBanks & banks, int least_tokens);
    ~DeviceAreas();

    DeviceAreas(const DeviceAreas &)             = delete;
    DeviceAreas & operator=(const DeviceAreas &) = delete;

    // Whether a prompt of n_tokens passes through areas; and whether a layer does.
    bool serve(int n_tokens, bool decode) const { return !decode && n_tokens >= least_tokens && !areas.empty(); }
    bool serve(int layer, int n_tokens, bool decode) const { return serve(n_tokens, decode) && has_area(layer); }

    bool has_area(int layer) const { return index_of[layer] >= 0; }

    // The index of the layer's area on its device.
    int number(int layer) const { return layer % banks.of(layer).n_areas(); }

    // Whether the layer may come while the one before it computes.
    bool may_come_ahead(int layer) const { return index_of[layer] >= 0 && index_of[layer] != index_of[layer - 1]; }

    // Whether the context has the areas; it gets them if they are free.
    bool own(const void * context);

    // A layer comes, with these experts, ascending. slots: by expert, -1: none. Lists the experts to bring from host
    // memory. False: another context has the areas.
    bool begin(const void * context, int layer, const std::vector<int> & experts, const std::vector<int> & slots,
        std::vector<int> & from_host);

    // Brings these and the experts in slots; owner holds the former, and computes none of them on the host.
    void bring(Owner & owner, int layer, const std::vector<int> & from_host);

    // Then the next layer begins to come: the experts in slots (by expert, as above), and all in host memory. The slots
    // keep their experts until stop_ahead(), or release().
    // REQUIRES: may_come_ahead(layer)
    void bring_ahead(int layer, const std::vector<int> & slots);

    // Nothing more is brought ahead for the context.
    void stop_ahead(const void * context);

    // Whether the expert of the present layer could be read, once it was brought.
    bool has(int layer, int expert) const { return areas[index_of[layer]].brought[expert] != 0; }

    // Waits until nothing is being brought ahead.
    void wait_idle();

    // The context's computing there is over.
    void release(const void * context);

private:
    struct Area {
        int                  layer   = -1;
        std::vector<uint8_t> brought = {}; // by expert
    };

    Table &          table;
    DeviceBanks &    banks;
    const int        least_tokens;
    Mutex            mutex;
    CondVar          changed;
    const void *     owner GUARDED_BY(mutex) = nullptr;
    int              ahead GUARDED_BY(mutex) = -1;     // the layer that is being brought
    std::vector<int> ahead_slots GUARDED_BY(mutex);    // of its experts
    bool             busy GUARDED_BY(mutex)   = false; // the thread is copying one of its experts
    bool             ending GUARDED_BY(mutex) = false;
    std::thread      thread;

    // Without the mutex: used by the present layer, which waits until the thread is not busy, or by the busy thread.
    std::vector<Area> areas;      // of all devices
    std::vector<int>  index_of;   // by layer, in `areas`; -1: its device has none
    std::vector<int>  slots_here; // of the present layer's experts that are to be copied; -1: none

    Area & area_for(int layer);
    void   copy(int layer, const std::vector<int> & slots);
    void   work();
    void   copy_ahead(int layer) REQUIRES(mutex);
    void   upload_ahead(int layer) REQUIRES(mutex);
};

} // namespace pyorch
