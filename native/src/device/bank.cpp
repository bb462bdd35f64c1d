#include "device/bank.h"

#include "base/cpu_time.h"
#include "base/status.h"
#include "model/layout.h"

#include "ggml-alloc.h"

#include <algorithm>

namespace pyorch {

bool alike(const MoeLayer & a, const MoeLayer & b) {
    const auto same = [](const ExpertTensor & x, const ExpertTensor & y) {
        return x.role == y.role && x.type == y.type && x.n_in == y.n_in && x.n_out == y.n_out;
    };
    return std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(), same);
}

static std::string backend_of(ggml_backend_dev_t device) {
    const ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    return registry ? ggml_backend_reg_name(registry) : "";
}

uint64_t largest_matrix(const MoeLayer & layer) {
    uint64_t bytes = 0;
    for (const auto & tensor : layer.tensors) {
        bytes = std::max(bytes, tensor.stride);
    }
    return bytes;
}

LayerRange all_layers(const ModelMap & map) { return { 0, (int) map.layers.size() }; }

uint64_t expert_bytes(const ModelMap & map, LayerRange layers) {
    uint64_t bytes = 0;
    for (int layer = layers.begin; layer < layers.end; ++layer) {
        bytes += map.layers[layer].n_expert * map.layers[layer].expert_bytes();
    }
    return bytes;
}

int n_whole_layers(const ModelMap & map, LayerRange layers, double share) {
    constexpr double PARTLY = 0.6; // of the experts of each layer that is partly there
    const int        most   = std::max(0, std::min(map.n_decoded(), layers.end) - layers.begin);
    const double     n      = (double) layers.size() * std::max(0.0, share - PARTLY) / (1 - PARTLY);
    return share >= 1 ? most : std::min((int) n, most);
}

std::vector<DevicePool> form_device_pools(
    const ModelMap & map, LayerRange layers, double share, int n_whole, std::vector<int> & pool_of) {
    std::vector<DevicePool> pools;
    pool_of.clear();
    const int first = layers.begin + n_whole; // partly there
    for (int i = layers.begin; i < first; ++i) {
        const MoeLayer & layer = map.layers[i];
        pools.push_back({ { i }, layer.n_expert, layer.n_expert });
        pool_of.push_back(i - layers.begin);
    }
    const uint64_t all = expert_bytes(map, layers), whole = expert_bytes(map, { layers.begin, first });
    share = all > whole ? std::max(0.0, share * (double) all - (double) whole) / (double) (all - whole) : 0;
    for (int i = first; i < layers.end; ++i) {
        const MoeLayer & layer = map.layers[i];
        const auto       slots = (uint64_t) (share * layer.n_expert);
        // The newest pool of its kind with room.
        auto pool = std::find_if(pools.rbegin(), pools.rend(), [&](const DevicePool & p) {
            return p.layers.front() >= first && alike(map.layers[p.layers.front()], layer) &&
                share * (p.n_experts + layer.n_expert) <= DevicePool::MAX_SLOTS * layer.n_expert &&
                (p.n_slots + slots) * largest_matrix(layer) <= DevicePool::MAX_TENSOR_BYTES;
        });
        if (pool == pools.rend()) {
            pools.push_back({ {}, 0 });
            pool = pools.rbegin();
        }
        pool->layers.push_back(i);
        pool->n_experts += layer.n_expert;
        pool->n_slots = (int) std::min<double>(pool->n_experts, share * pool->n_experts);
        pool_of.push_back((int) (pools.rend() - pool) - 1);
    }
    return pools;
}

static constexpr int MOST_AREAS = 2;

int n_device_areas(uint64_t budget, uint64_t area_bytes) {
    constexpr int LEAST_SHARE = 3; // areas take at most a third of the memory
    return (int) std::min<uint64_t>(MOST_AREAS, budget / (LEAST_SHARE * area_bytes));
}

namespace {

ggml_type known_type_of(const ExpertTensor & tensor) {
    const ggml_type type = type_of(tensor);
    if (type == GGML_TYPE_COUNT) {
        throw Failure(
            PYORCH_FORMAT, format("%s has a type that is not known: %s", tensor.name.c_str(), tensor.type.c_str()));
    }
    return type;
}

} // namespace

DeviceBank::DeviceBank(
    const ModelMap & map, ggml_backend_dev_t device, LayerRange layers, std::shared_ptr<PageLocks> locks) :
        device(device), layers(layers), landings(device), map(map), locks(std::move(locks)) {}

// share: of the experts that have slots.
void DeviceBank::form_pools(double share) {
    pools.clear();
    n_whole = whole_layers ? n_whole_layers(map, layers, share) : 0;
    for (const DevicePool & pool : form_device_pools(map, layers, share, n_whole, pool_by_layer)) {
        pools.push_back({ pool, {} });
    }
}

// Returns their bytes on the device.
uint64_t DeviceBank::make_tensors() {
    size_t n_tensors = 0;
    for (const Pool & pool : pools) {
        n_tensors += map.layers[pool.layers.front()].tensors.size();
    }
    tensors.reset(ggml_init({ (n_tensors + 1) * ggml_tensor_overhead(), nullptr, true }));
    const ggml_backend_buffer_type_t type      = ggml_backend_dev_buffer_type(device);
    const size_t                     alignment = ggml_backend_buft_get_alignment(type);
    uint64_t                         bytes     = 0;
    for (Pool & pool : pools) {
        pool.roles.clear();
        for (const auto & tensor : map.layers[pool.layers.front()].tensors) {
            ggml_tensor * slots = nullptr;
            if (pool.n_slots > 0) {
                slots =
                    ggml_new_tensor_3d(tensors.get(), known_type_of(tensor), tensor.n_in, tensor.n_out, pool.n_slots);
                ggml_format_name(slots, "pyorch_slots.%s", tensor.name.c_str());
                bytes += round_up(ggml_backend_buft_get_alloc_size(type, slots), alignment);
            }
            pool.roles.push_back(slots);
        }
    }
    return bytes;
}

// Allocates two areas, or one, if most of the memory remains for slots.
void DeviceBank::allocate_areas(uint64_t budget) {
    const ggml_backend_buffer_type_t type      = ggml_backend_dev_buffer_type(device);
    const size_t                     alignment = ggml_backend_buft_get_alignment(type);
    std::vector<int>                 kinds; // the first layer of each kind
    kind_by_layer.clear();
    for (int i = layers.begin; i < layers.end; ++i) {
        const auto kind = std::find_if(kinds.begin(), kinds.end(), [&](int of) {
            return alike(map.layers[of], map.layers[i]) && map.layers[of].n_expert == map.layers[i].n_expert;
        });
        kind_by_layer.push_back((int) (kind - kinds.begin()));
        if (kind == kinds.end()) {
            kinds.push_back(i);
        }
    }
    size_t n_tensors = 0;
    for (int of : kinds) {
        n_tensors += MOST_AREAS * map.layers[of].tensors.size();
    }
    area_tensors.reset(ggml_init({ (n_tensors + 1) * ggml_tensor_overhead(), nullptr, true }));
    std::vector<Area> made(MOST_AREAS);
    uint64_t          bytes = 0; // of one area
    for (Area & area : made) {
        for (int of : kinds) {
            uint64_t all = 0;
            area.emplace_back();
            for (const auto & tensor : map.layers[of].tensors) {
                ggml_tensor * t = ggml_new_tensor_3d(
                    area_tensors.get(), known_type_of(tensor), tensor.n_in, tensor.n_out, map.layers[of].n_expert);
                ggml_format_name(t, "pyorch_area.%s", tensor.name.c_str());
                all += round_up(ggml_backend_buft_get_alloc_size(type, t), alignment);
                area.back().push_back(t);
            }
            bytes = std::max(bytes, all);
        }
    }
    // One buffer each: one is cleared while the device computes in the other.
    while ((int) area_buffers.size() < n_device_areas(budget, bytes)) {
        ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(type, bytes));
        if (!buffer) {
            break;
        }
        ggml_backend_buffer_clear(buffer.get(), 0);
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        for (auto & kind : made[area_buffers.size()]) { // all kinds in the same memory
            auto * at = (char *) ggml_backend_buffer_get_base(buffer.get());
            for (ggml_tensor * t : kind) {
                ggml_backend_tensor_alloc(buffer.get(), t, at);
                at += round_up(ggml_backend_buft_get_alloc_size(type, t), alignment);
            }
        }
        used_bytes += ggml_backend_buffer_get_size(buffer.get());
        area_buffers.push_back(std::move(buffer));
    }
    areas.assign(made.begin(), made.begin() + (int) area_buffers.size());
    kind_in.assign(areas.size(), -1);
}

// Some kernels read beyond the last row of a matrix: as many bytes as the device wants behind a tensor. They multiply
// these by zero, which is harmless unless the bytes are no number. The bytes of another kind of layer may be none;
// those of the same kind are numbers.
void DeviceBank::turn_area(int number, int layer) {
    const int  kind     = kind_by_layer[layer - layers.begin];
    const auto reads_on = [&](const ggml_tensor * t) {
        return ggml_backend_buffer_get_alloc_size(t->buffer, t) > ggml_nbytes(t);
    };
    const Area & area = areas[number];
    if (kind_in[number] >= 0 && kind_in[number] != kind &&
        std::any_of(area[kind].begin(), area[kind].end(), reads_on)) {
        ggml_backend_buffer_clear(area_buffers[number].get(), 0);
    }
    kind_in[number] = kind;
}

void DeviceBank::allocate(uint64_t budget, bool whole, bool prompts) {
    whole_layers = whole;
    used_bytes   = 0;
    areas.clear();
    area_buffers.clear();
    buffer.reset();
    const uint64_t all = expert_bytes(map, layers);
    if (budget < all && prompts) {
        allocate_areas(budget);
        budget -= used_bytes;
    }
    double         share   = std::min(1.0, (double) budget / (double) all);
    bool           refused = false, modest = false;
    const uint64_t wanted = std::min(budget, all);
    for (; share > 0; share = share * all < 1 ? 0 : share) {
        form_pools(share);
        const uint64_t bytes = make_tensors();
        if (bytes == 0) {
            break;
        }
        if (bytes > budget && share < 1) { // by the device's alignment; a budget for all experts has room for it
            share *= std::min(0.999, (double) budget / (double) bytes);
            continue;
        }
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(tensors.get(), ggml_backend_dev_buffer_type(device)));
        if (buffer && refused && !modest) { // the buffers of the new context come later
            modest = true;
            buffer.reset();
            share *= 0.75;
            continue;
        }
        if (buffer) {
            ggml_backend_buffer_clear(buffer.get(), 0); // unused rows are computed too: they must be numbers
            ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            used_bytes += ggml_backend_buffer_get_size(buffer.get());
            break;
        }
        refused = true;
        share *= 0.75;
    }
    if (!buffer) {
        form_pools(0);
        make_tensors();
    }
    if (!link) {
        uint64_t largest = 0; // bytes of a matrix
        for (int layer = layers.begin; layer < layers.end; ++layer) {
            largest = std::max(largest, largest_matrix(map.layers[layer]));
        }
        link = std::make_unique<DeviceLink>(device, largest, locks.get());
    }
    if (!refused && !buffer && budget > 0) {
        notice(format("note: the budget in %s's memory has no room for an expert: none is computed there",
            ggml_backend_dev_name(device)));
    } else if (refused) {
        notice(format("note: %s has no memory for %s of experts: %s is taken", ggml_backend_dev_name(device),
            mebibytes(wanted).c_str(), mebibytes(buffer ? ggml_backend_buffer_get_size(buffer.get()) : 0).c_str()));
    }
}

bool DeviceBank::has_room_for_all() const {
    return std::all_of(pools.begin(), pools.end(), [](const Pool & pool) { return pool.n_slots == pool.n_experts; });
}

// ggml's RPC keeps one graph for each device, and mistakes another context's graph for it if no graph is cut anywhere.
bool DeviceBank::may_be_passed(int layer) const {
    const int n_decoded = std::min(map.n_decoded(), layers.end) - layers.begin;
    return has_whole(layer) && (layer > layers.begin || n_whole < n_decoded || backend_of(device) != "RPC");
}

bool DeviceBank::upload(int layer, int slot, int role, const char * bytes) {
    return send(slots(layer, role), slot, bytes);
}

bool DeviceBank::upload_to_area(int number, int layer, int expert, int role, const char * bytes) {
    turn_area(number, layer);
    return send(area(number, layer, role), expert, bytes);
}

bool DeviceBank::send(ggml_tensor * to, int index, const char * bytes) {
    const uint64_t begin = clock_ns();
    const bool     stays = link->send(to, index * to->nb[2], bytes, to->nb[2]);
    uploading_ns += clock_ns() - begin;
    uploaded += to->nb[2];
    return stays;
}

void DeviceBank::wait_for_uploads() {
    const uint64_t begin = clock_ns();
    link->wait();
    uploading_ns += clock_ns() - begin;
}

// One matrix of a tensor.
static ggml_tensor matrix_of(ggml_tensor * tensor, int index) {
    ggml_tensor matrix = *tensor;
    matrix.ne[2]       = 1;
    matrix.nb[3]       = matrix.nb[2];
    matrix.view_src    = tensor;
    matrix.view_offs   = index * tensor->nb[2];
    matrix.data        = (char *) tensor->data + matrix.view_offs;
    return matrix;
}

void DeviceBank::copy_to_area(int number, int layer, int expert, int slot) {
    turn_area(number, layer);
    copy(number, layer, expert, slot, true);
}

void DeviceBank::copy_from_area(int number, int layer, int expert, int slot) {
    copy(number, layer, expert, slot, false);
}

void DeviceBank::copy(int number, int layer, int expert, int slot, bool to_area) {
    for (int role = 0; role < (int) map.layers[layer].tensors.size(); ++role) {
        ggml_tensor in_slot = matrix_of(slots(layer, role), slot);
        ggml_tensor in_area = matrix_of(area(number, layer, role), expert);
        to_area ? link->copy(&in_slot, &in_area) : link->copy(&in_area, &in_slot);
    }
}

void DeviceBank::gather_in_area(int number, int layer, const std::vector<int> & slots) {
    if (std::all_of(slots.begin(), slots.end(), [](int slot) { return slot < 0; })) {
        return;
    }
    turn_area(number, layer);
    if (gather(number, layer, slots)) {
        return;
    }
    for (int expert = 0; expert < (int) slots.size(); ++expert) {
        if (slots[expert] >= 0) {
            copy_to_area(number, layer, expert, slots[expert]);
        }
    }
    wait_for_uploads();
}

// One call for each matrix would take as long as the driver needs for some hundred matrices, and all other threads
// would wait for it. To get_rows, a matrix is a row of numbers. False: the device cannot.
bool DeviceBank::gather(int number, int layer, const std::vector<int> & slots) {
    // get_rows during other computing was tested for these backends only.
    const std::string backend = backend_of(device);
    if (backend != "CUDA" && backend != "RPC") {
        return false;
    }
    MutexLock              lock(gathering);
    const int              n_roles = (int) map.layers[layer].tensors.size();
    const int64_t          n       = (int64_t) slots.size();
    const ggml_context_ptr ctx(
        ggml_init({ 4 * n_roles * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    ggml_cgraph * graph   = ggml_new_graph(ctx.get());
    ggml_tensor * numbers = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n);
    const size_t  bytes   = ggml_backend_buft_get_alloc_size(ggml_backend_dev_buffer_type(device), numbers);
    // Kept: before a device frees memory, it waits for all computing there.
    if (!gathered || ggml_backend_buffer_get_size(gathered.get()) < bytes) {
        gathered.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), bytes));
    }
    if (!gathered ||
        ggml_backend_tensor_alloc(gathered.get(), numbers, ggml_backend_buffer_get_base(gathered.get())) !=
            GGML_STATUS_SUCCESS) {
        return false;
    }
    for (int role = 0; role < n_roles; ++role) {
        const ggml_tensor * pool = this->slots(layer, role);
        const ggml_tensor * to   = area(number, layer, role);
        if (pool->nb[2] % sizeof(int32_t) != 0 || pool->nb[2] != to->nb[2]) {
            return false;
        }
        ggml_tensor * from =
            ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, (int64_t) (pool->nb[2] / sizeof(int32_t)), pool->ne[2]);
        from->buffer       = pool->buffer;
        from->data         = pool->data;
        ggml_tensor * rows = ggml_get_rows(ctx.get(), from, numbers);
        rows->buffer       = to->buffer;
        rows->data         = to->data;
        if (!ggml_backend_dev_supports_op(device, rows)) {
            return false;
        }
        ggml_build_forward_expand(graph, rows);
    }
    if (!gatherer) {
        gatherer.reset(ggml_backend_dev_init(device, nullptr));
    }
    std::vector<int32_t> rows(slots.begin(), slots.end());
    std::replace_if(rows.begin(), rows.end(), [](int32_t slot) { return slot < 0; }, 0); // any slot: it is overwritten
    if (!gatherer) {
        return false;
    }
    ggml_backend_tensor_set(numbers, rows.data(), 0, rows.size() * sizeof(int32_t));
    return ggml_backend_graph_compute(gatherer.get(), graph) == GGML_STATUS_SUCCESS;
}

void DeviceBank::reset_counts() {
    uploaded     = 0;
    uploading_ns = 0;
}

DeviceBanks::DeviceBanks(const ModelMap & map, const std::vector<ggml_backend_dev_t> & devices,
    const std::vector<int> & ends, const std::shared_ptr<PageLocks> & locks) {
    for (size_t i = 0; i < devices.size(); ++i) {
        banks.push_back(
            std::make_unique<DeviceBank>(map, devices[i], LayerRange{ i > 0 ? ends[i - 1] : 0, ends[i] }, locks));
        by_layer.resize(ends[i], banks.back().get());
    }
}

int DeviceBanks::pool_of(int layer) const {
    int before = 0;
    for (const auto & bank : banks) {
        if (bank->layers.has(layer)) {
            return before + bank->pool_of(layer);
        }
        before += (int) bank->all().size();
    }
    return before; // every layer has a pool
}

bool DeviceBanks::have_room_for_all() const {
    return std::all_of(banks.begin(), banks.end(), [](const auto & bank) { return bank->has_room_for_all(); });
}

void DeviceBanks::wait_for_uploads() {
    for (const auto & bank : banks) {
        bank->wait_for_uploads();
    }
}

void DeviceBanks::reset_counts() {
    for (const auto & bank : banks) {
        bank->reset_counts();
    }
}

} // namespace pyorch
