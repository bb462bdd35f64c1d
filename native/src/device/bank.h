// DeviceBank: experts in the memory of a device.
//
// The device's kernels cannot ask for the address of an expert. They get tensors of slots instead of the model's
// tensors, and the numbers of slots instead of expert ids.
//
// Layers with equal experts share their slots: together they are a *pool*. So each layer has as many slots as its
// experts are worth, and none is idle.
//
// A prompt uses nearly all experts of each layer. They pass through *areas* with room for a whole layer; an expert has
// the same place there as in the model's tensor. The layers take turns.
//
// Memory is allocated once and kept. Uploads have the order of the model's file: no device knows the order of the
// processor's kernels.
//
// Several devices divide the layers: each has the experts of the consecutive layers that llama.cpp computes there. So
// nothing of a layer goes between devices, and each device has its own slots and areas.

#pragma once

#include "base/mutex.h"
#include "device/landings.h"
#include "device/link.h"
#include "model/model_map.h"

#include "ggml-cpp.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

struct DevicePool {
    // Of a tensor with slots of several layers: some backends count elements with 32 bits, others limit the size of
    // buffers. The slots of one layer never need more than the model's own tensor.
    static constexpr uint64_t MAX_TENSOR_BYTES = 2ull << 30;

    // In experts of a layer. With more tokens than its vector kernels take, a GPU begins a block of threads for each
    // slot and 128 rows, even an unused one: at most four times as many as for the model's own tensor.
    static constexpr int MAX_SLOTS = 4;

    std::vector<int> layers;    // indices into the layers with experts, ascending
    int              n_experts; // of each of these layers, summed
    int              n_slots = 0;
};

// Layers of a model, as indices into the layers with experts: from begin, before end.
struct LayerRange {
    int begin;
    int end;

    int  size() const { return end - begin; }
    bool has(int layer) const { return begin <= layer && layer < end; }
};

LayerRange all_layers(const ModelMap & map);

// Bytes of all experts of the layers.
uint64_t expert_bytes(const ModelMap & map, LayerRange layers);

// Whether experts of two layers have the same matrices.
bool alike(const MoeLayer & a, const MoeLayer & b);

// Bytes of the largest matrix of an expert.
uint64_t largest_matrix(const MoeLayer & layer);

// How many of a device's layers, the first ones, are wholly on it, if its slots hold a share of all experts. A layer
// that is partly there costs a token some trips to the host, however small the rest. A whole layer costs none, and its
// prompts need no area. So memory beyond the most used experts goes to whole layers. Let h(f) be the share of uses that
// a share f of a layer's experts serves, C the processor's time for all uses of a layer, and o the time of the trips.
// Then whole layers pay from the f with o + C (1 - h(f)) = C h'(f) (1 - f). In real models 1 - h(f) = (1 - f)^k, with k
// from 2 to 4, and o is 0.05 to 0.2 C: so f is 0.5 to 0.75. The time of a token hardly depends on the choice between
// them.
int n_whole_layers(const ModelMap & map, LayerRange layers, double share);

// share: of the layers' experts that have slots. pool_of: becomes the index of each layer's pool. Each of the first
// n_whole layers has a pool of its own, with a slot for each expert.
std::vector<DevicePool> form_device_pools(
    const ModelMap & map, LayerRange layers, double share, int n_whole, std::vector<int> & pool_of);

// How many areas of area_bytes a budget allows in addition to slots: two, one, or none if they would take more than a
// third.
int n_device_areas(uint64_t budget, uint64_t area_bytes);

class DeviceBank {
public:
    struct Pool : DevicePool {
        std::vector<ggml_tensor *> roles; // [n_in, n_out, n_slots] each
    };

    // layers: of the device; all calls are about these. locks: of the memory that matrices come from; null: none.
    DeviceBank(
        const ModelMap & map, ggml_backend_dev_t device, LayerRange layers, std::shared_ptr<PageLocks> locks = nullptr);

    DeviceBank(const DeviceBank &)             = delete;
    DeviceBank & operator=(const DeviceBank &) = delete;

    // Allocates at most `budget` bytes, and no more than all experts of its layers need. If the device refuses, it
    // tries again with a quarter less; then another quarter is left to the buffers of contexts. It says so once, and
    // may end with nothing. whole: some layers may be there wholly. prompts: some prompts pass through areas. Call it
    // once, or again after it threw.
    void allocate(uint64_t budget, bool whole = false, bool prompts = true);

    const ggml_backend_dev_t device;
    const LayerRange         layers;
    DeviceLandings           landings;

    const std::vector<Pool> & all() const { return pools; }
    int                       pool_of(int layer) const { return pool_by_layer[layer - layers.begin]; }
    int                       n_slots(int layer) const { return pools[pool_of(layer)].n_slots; }
    bool has_whole(int layer) const { return layer - layers.begin < n_whole; } // a slot for each, in a pool of its own
    bool may_be_passed(int layer) const;         // by graphs that do not ask, once all its experts are there
    uint64_t used() const { return used_bytes; } // bytes of the device
    bool     has_room_for_all() const;           // experts of all its layers, at once

    // The slots for one matrix of a layer's experts.
    ggml_tensor * slots(int layer, int role) const { return pools[pool_of(layer)].roles[role]; }

    // Areas with room for any layer: 0 if memory is short, or all experts have slots.
    int n_areas() const { return (int) areas.size(); }

    // Room for one matrix of all experts of a layer: [n_in, n_out, n_expert].
    ggml_tensor * area(int number, int layer, int role) const {
        return areas[number][kind_by_layer[layer - layers.begin]][role];
    }

    // As upload(), to the expert's place in an area. And from a slot: it is there after wait_for_uploads(), too. If the
    // area has experts of another kind of layer, nothing may compute there or be on its way any more.
    bool upload_to_area(int number, int layer, int expert, int role, const char * bytes);
    void copy_to_area(int number, int layer, int expert, int slot);
    void copy_from_area(int number, int layer, int expert, int slot); // an expert of the area

    // Copies a layer's experts in slots (by expert, below 0: none) to an area without wanted experts, with one call of
    // the device's kernels.
    void gather_in_area(int number, int layer, const std::vector<int> & slots);

    // Sends one matrix of an expert, as the model has it, to a slot that no kernel reads. It is there after the next
    // wait_for_uploads(). True: bytes must stay until then; false: they may go before. Any number of threads.
    bool upload(int layer, int slot, int role, const char * bytes);
    void wait_for_uploads();

    // Bytes sent to the device, and the time for it, summed over threads.
    uint64_t bytes_uploaded() const { return uploaded; }
    uint64_t upload_ns() const { return uploading_ns; }
    void     reset_counts();

private:
    const ModelMap &        map;
    std::vector<Pool>       pools;
    std::vector<int>        pool_by_layer;
    bool                    whole_layers = false;
    int                     n_whole      = 0;
    uint64_t                used_bytes   = 0;
    std::atomic<uint64_t>   uploaded{ 0 };
    std::atomic<uint64_t>   uploading_ns{ 0 };
    ggml_context_ptr        tensors;
    ggml_backend_buffer_ptr buffer;

    // By kind of layers and role.
    using Area = std::vector<std::vector<ggml_tensor *>>;

    std::vector<Area>                    areas;
    std::vector<int>                     kind_by_layer;
    std::vector<int>                     kind_in; // by area, -1: none yet
    ggml_context_ptr                     area_tensors;
    std::vector<ggml_backend_buffer_ptr> area_buffers;

    void     allocate_areas(uint64_t budget);
    void     turn_area(int number, int layer);
    bool     gather(int number, int layer, const std::vector<int> & slots);
    void     form_pools(double share);
    uint64_t make_tensors();
    void     copy(int number, int layer, int expert, int slot, bool to_area);
    bool     send(ggml_tensor * to, int index, const char * bytes);

    Mutex                   gathering;
    ggml_backend_buffer_ptr gathered GUARDED_BY(gathering); // the numbers of slots
    ggml_backend_ptr        gatherer GUARDED_BY(gathering); // the device's kernels; null: not yet

    std::shared_ptr<PageLocks>  locks;
    std::unique_ptr<DeviceLink> link; // destroyed first: it may be writing to a buffer
};

// The banks of all devices of a model; together they have all of its layers.
class DeviceBanks {
public:
    // ends: by device, in their order: the layer after its last one.
    DeviceBanks(const ModelMap & map, const std::vector<ggml_backend_dev_t> & devices, const std::vector<int> & ends,
        const std::shared_ptr<PageLocks> & locks = nullptr);

    const std::vector<std::unique_ptr<DeviceBank>> & all() const { return banks; }
    DeviceBank &                                     of(int layer) const { return *by_layer[layer]; }

    // Pools are numbered over all devices.
    int pool_of(int layer) const;

    bool have_room_for_all() const;
    void wait_for_uploads();
    void reset_counts();

private:
    std::vector<std::unique_ptr<DeviceBank>> banks;
    std::vector<DeviceBank *>                by_layer;
};

} // namespace pyorch
