// Experts in the memory of a device.
//
// Kernels there cannot ask where an expert is. They are given tensors of slots in place of the model's tensors, and the
// numbers of slots in place of those of experts.
//
// Some layers whose experts are alike share their slots: together they are a *pool*. So a layer has as many slots as its
// experts are worth, and none lies idle.
//
// A prompt wants nearly all experts of each layer, so they pass through *areas* that have room for a whole layer: there
// an expert lies where the model's tensor has it. One layer after another has its turn.
//
// Memory is taken once and kept. What is uploaded is as the model's file has it: no device knows the order of the
// processor's kernels.
//
// Several devices divide the layers: each has the experts of consecutive ones, those that llama.cpp has it compute. So
// nothing of a layer goes from one to another, and each has slots and areas of its own.

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
    // Of a tensor with slots of several layers: some backends count elements with 32 bits, others have no larger
    // buffers. Slots of one layer are never more than the model's own tensor has experts, with which a backend has to
    // cope.
    static constexpr uint64_t MAX_TENSOR_BYTES = 2ull << 30;

    // By experts of a layer. With more tokens than its kernels for vectors take, a GPU begins a block of threads for each
    // slot and 128 rows, whether anything is computed there or not: at most four times those of the model's own.
    static constexpr int MAX_SLOTS = 4;

    std::vector<int> layers;    // indices into those with experts, ascending
    int              n_experts; // of all of them
    int              n_slots = 0;
};

// Layers of a model, as indices into those with experts: from begin on, before end.
struct LayerRange {
    int begin;
    int end;

    int  size() const { return end - begin; }
    bool has(int layer) const { return begin <= layer && layer < end; }
};

LayerRange all_layers(const ModelMap & map);

// Of all their experts.
uint64_t expert_bytes(const ModelMap & map, LayerRange layers);

// Whether experts of two layers have the same matrices.
bool alike(const MoeLayer & a, const MoeLayer & b);

// Bytes of the largest matrix of an expert.
uint64_t largest_matrix(const MoeLayer & layer);

// How many of a device's layers are wholly there, where it has slots for a share of their experts: the first ones. A
// layer of which a part is there costs a token some trips to the host, however small the rest; one that is wholly there
// costs none, and prompts pass through no area. So what is more than most uses need goes to whole layers. With h(f) of
// the uses answered by a share f of a layer's experts, C what the processor takes for all its uses of a layer and o what
// the trips take, that pays from f on where o + C (1 - h(f)) = C h'(f) (1 - f). Uses of real models concentrate so that
// 1 - h(f) = (1 - f)^k, k from 2 to 4, and o is 0.05 to 0.2 C: f is 0.5 to 0.75, and a token takes hardly longer by
// another choice between them.
int n_whole_layers(const ModelMap & map, LayerRange layers, double share);

// share: of the layers' experts that there are slots for. pool_of: becomes the index of each layer's pool. A layer that
// is wholly there, of the first n_whole, has a pool of its own, with a slot for each expert.
std::vector<DevicePool> form_device_pools(
    const ModelMap & map, LayerRange layers, double share, int n_whole, std::vector<int> & pool_of);

// How many areas of so many bytes each a budget has room for beside slots: two, or one, or none where they would take
// more than a third of it.
int n_device_areas(uint64_t budget, uint64_t area_bytes);

class DeviceBank {
public:
    struct Pool : DevicePool {
        std::vector<ggml_tensor *> roles; // [n_in, n_out, n_slots] each
    };

    // layers: that the device has, and whoever asks asks of these. locks: of the memory that matrices come from, null:
    // none.
    DeviceBank(
        const ModelMap & map, ggml_backend_dev_t device, LayerRange layers, std::shared_ptr<PageLocks> locks = nullptr);

    DeviceBank(const DeviceBank &)             = delete;
    DeviceBank & operator=(const DeviceBank &) = delete;

    // Takes memory: at most so many bytes, and no more than all experts of its layers need. What the device refuses is
    // asked for again, by a quarter less; then one more quarter is left to the buffers of contexts. That is said once,
    // and it may come to nothing. whole: some layers may be there wholly. Called once, but again where it threw. prompts: some pass
    // through areas.
    void allocate(uint64_t budget, bool whole = false, bool prompts = true);

    const ggml_backend_dev_t device;
    const LayerRange         layers;
    DeviceLandings           landings;

    const std::vector<Pool> & all() const { return pools; }
    int                       pool_of(int layer) const { return pool_by_layer[layer - layers.begin]; }
    int                       n_slots(int layer) const { return pools[pool_of(layer)].n_slots; }
    bool has_whole(int layer) const { return layer - layers.begin < n_whole; } // a slot for each, and of no other layer
    bool may_be_passed(int layer) const;         // by graphs that do not ask, once all are there
    uint64_t used() const { return used_bytes; } // of the device
    bool     has_room_for_all() const;           // experts of all its layers, at once

    // The slots for one matrix of a layer's experts.
    ggml_tensor * slots(int layer, int role) const { return pools[pool_of(layer)].roles[role]; }

    // Areas of which each has room for any layer: 0 where memory is short, or all experts have slots.
    int n_areas() const { return (int) areas.size(); }

    // Room for one matrix of all experts of a layer: [n_in, n_out, n_expert].
    ggml_tensor * area(int number, int layer, int role) const {
        return areas[number][kind_by_layer[layer - layers.begin]][role];
    }

    // As upload(), to the place of the expert in an area; and from a slot: there after wait_for_uploads(), too. Where the
    // area has experts of a layer of another kind, nothing computes there any more, and nothing is on its way.
    bool upload_to_area(int number, int layer, int expert, int role, const char * bytes);
    void copy_to_area(int number, int layer, int expert, int slot);
    void copy_from_area(int number, int layer, int expert, int slot); // what is there

    // Those of a layer that have slots (by expert, below 0: none) to an area in which nothing is yet that is wanted: by
    // the device's kernels, at once.
    void gather_in_area(int number, int layer, const std::vector<int> & slots);

    // One matrix of an expert, as the model has it, goes to a slot that no kernel reads. It is there after the next
    // wait_for_uploads(). True: bytes must stay until then; false: they may go before. Any number of threads.
    bool upload(int layer, int slot, int role, const char * bytes);
    void wait_for_uploads();

    // Bytes that went to the device, and the time that took, summed over threads.
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
    std::unique_ptr<DeviceLink> link; // goes first: it may be on its way to a buffer
};

// Those of all devices of a model, which have all of its layers.
class DeviceBanks {
public:
    // ends: by device, in their order: the layer behind its last one.
    DeviceBanks(const ModelMap & map, const std::vector<ggml_backend_dev_t> & devices, const std::vector<int> & ends,
        const std::shared_ptr<PageLocks> & locks = nullptr);

    const std::vector<std::unique_ptr<DeviceBank>> & all() const { return banks; }
    DeviceBank &                                     of(int layer) const { return *by_layer[layer]; }

    // Pools are numbered through.
    int pool_of(int layer) const;

    bool have_room_for_all() const;
    void wait_for_uploads();
    void reset_counts();

private:
    std::vector<std::unique_ptr<DeviceBank>> banks;
    std::vector<DeviceBank *>                by_layer;
};

} // namespace pyorch
