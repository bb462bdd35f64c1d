// Memory of a device: claims about native/src/device/bank.h, on a device whose memory is the host's; and about
// the host's memory that a device reads by itself (native/src/banks/page_locks.h).

#include "device/bank.h"
#include "banks/host_bank.h"
#include "check.h"
#include "synthetic.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"

#include <algorithm>
#include <vector>

using namespace pyorch;

namespace {

constexpr size_t READ_ON = 64; // bytes behind a matrix that kernels read, times zero

// As ggml's CUDA wants of quantized tensors with odd rows.
ggml_backend_buffer_type_t memory_that_is_read_on() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type t = *ggml_backend_cpu_buffer_type();
        t.iface.get_alloc_size     = [](ggml_backend_buffer_type_t, const ggml_tensor * of) {
            return ggml_nbytes(of) + READ_ON;
        };
        return t;
    }();
    return &type;
}

ggml_backend_device device_that_reads_on() {
    ggml_backend_device device   = {};
    device.iface.get_name        = [](ggml_backend_dev_t) { return "made up"; };
    device.iface.get_props       = [](ggml_backend_dev_t, ggml_backend_dev_props * props) { *props = {}; };
    device.iface.get_buffer_type = [](ggml_backend_dev_t) { return memory_that_is_read_on(); };
    return device;
}

// A scale of such a block may be no number, whatever the bytes were for the other kind.
void areas_hold_nothing_of_another_kind() {
    const ModelMap map = synthetic_map(
        path, 4, 4, [](int) { return 64; }, 2, [](int layer) { return layer < 2 ? GGML_TYPE_Q8_0 : GGML_TYPE_Q5_0; });
    ggml_backend_device device = device_that_reads_on();
    DeviceBank          bank(map, &device, all_layers(map));
    uint64_t            largest = 0;
    for (const MoeLayer & layer : map.layers) {
        largest = std::max(largest, layer.n_expert * layer.expert_bytes());
    }
    bank.allocate(3 * (largest + 3 * (READ_ON + 64)));
    CHECK(bank.n_areas() == 1);

    const std::vector<char> poison(largest, '\xff'), weights(largest, '\1');
    const auto              behind = [&](int layer, int role, int expert) {
        const ggml_tensor * t  = bank.area(0, layer, role);
        const auto *        at = (const char *) t->data + (expert + 1) * t->nb[2];
        return std::vector<char>(at, at + READ_ON);
    };
    const auto fill = [&](int layer, const std::vector<char> & with) {
        for (int role = 0; role < 3; ++role) {
            for (int expert = 0; expert < 4; ++expert) {
                bank.upload_to_area(0, layer, expert, role, with.data());
            }
        }
    };
    const std::vector<char> nothing(READ_ON, 0);
    fill(0, poison);
    for (int role = 0; role < 3; ++role) {
        for (int expert : { 1, 3 }) { // those between them are not wanted
            bank.upload_to_area(0, 2, expert, role, weights.data());
            CHECK(behind(2, role, expert) == nothing);
        }
    }
    // What the same kind left are numbers, and clearing them would take time.
    fill(2, weights);
    bank.upload_to_area(0, 3, 3, 0, poison.data());
    CHECK(behind(3, 0, 0) == std::vector<char>(READ_ON, '\1'));
}

// What a device wants behind a matrix does not keep out the last expert of those for which there is room.
void all_experts_have_slots_where_the_budget_is_what_they_take() {
    const ModelMap      map = synthetic_map(path, 4, 4, [](int) { return 64; }, 2, [](int) { return GGML_TYPE_Q8_0; });
    ggml_backend_device device = device_that_reads_on();
    DeviceBank          bank(map, &device, all_layers(map));
    bank.allocate(map.expert_bytes());
    CHECK(bank.has_room_for_all() && bank.used() > map.expert_bytes());
    DeviceBank less(map, &device, all_layers(map));
    less.allocate(map.expert_bytes() - 1);
    CHECK(!less.has_room_for_all() && less.used() < map.expert_bytes());
}

// So that no multiplication looks at many more matrices than the model's own, and layers still share what they have.
void layers_share_at_most_four_times_as_many_slots_as_one_of_them_has_experts() {
    const ModelMap   map = synthetic_map(path, 48, 16, [](int) { return 32; }, 2, [](int) { return GGML_TYPE_Q8_0; });
    std::vector<int> pool_of;
    for (const double share : { 0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.97 }) {
        const int  n_whole = n_whole_layers(map, all_layers(map), share);
        const auto pools   = form_device_pools(map, all_layers(map), share, n_whole, pool_of);
        int        n_slots = 0, n_alone = 0;
        for (const DevicePool & pool : pools) {
            CHECK(pool.n_slots <= 4 * 16);
            n_slots += pool.n_slots;
            n_alone += pool.layers.size() == 1;
        }
        CHECK(std::abs(n_slots - share * 48 * 16) <= (double) pools.size());
        CHECK(n_alone <= n_whole + 1); // the last one
    }
}

// What a system would lock.
struct System {
    std::vector<std::pair<char *, uint64_t>> locked;
    std::vector<std::string>                 log; // what happened, in its order
    int                                      refuses_after = 1 << 20;

    std::shared_ptr<PageLocks> locks() {
        return std::make_shared<PageLocks>(
            [this](char * begin, uint64_t bytes) {
                log.push_back("lock");
                if ((int) locked.size() >= refuses_after) {
                    return false;
                }
                locked.push_back({ begin, bytes });
                return true;
            },
            [this](char * begin) {
                log.push_back("unlock");
                (void) *(volatile char *) begin; // it is still mapped
                locked.erase(std::find_if(locked.begin(), locked.end(), [&](auto & l) { return l.first == begin; }));
            });
    }
};

// In how many parts, which are all of it, in order, and each in a piece.
int n_parts_read(const System & system, const PageLocks & locks, const char * bytes, uint64_t n) {
    int          n_parts = 0;
    const char * next    = bytes;
    const bool   read    = locks.read(bytes, n, [&](const char * begin, uint64_t n_part) {
        CHECK(begin == next && n_part > 0);
        CHECK(std::any_of(system.locked.begin(), system.locked.end(),
            [&](const auto & piece) { return piece.first <= begin && begin + n_part <= piece.first + piece.second; }));
        next = begin + n_part;
        ++n_parts;
    });
    CHECK(next == (read ? bytes + n : bytes));
    return n_parts;
}

// Two kinds of layers, so that one gives its memory up for the other.
void a_device_reads_what_is_locked_until_its_memory_goes() {
    const ModelMap map = synthetic_map(path, 2, 64, [](int layer) { return layer == 0 ? 1 << 14 : 1 << 15; });
    System         system;
    const auto     locks = system.locks();
    {
        HostBank          bank(map, map.slots_bytes() / 2, locks);
        const int         small = bank.size_class(0, PART_MATRICES), large = bank.size_class(1, PART_MATRICES);
        const auto        bytes = map.layers[0].expert_bytes();
        std::vector<Slot> slots;
        while (Slot slot = bank.take(small)) {
            slots.push_back(slot);
        }
        CHECK(system.locked.size() > 1); // it takes several pieces, and one slot at least lies across two
        const auto across = [&](const Slot & slot) {
            return std::none_of(system.locked.begin(), system.locked.end(), [&](const auto & piece) {
                return piece.first <= slot.memory && slot.memory + bytes <= piece.first + piece.second;
            });
        };
        for (const Slot & slot : slots) {
            CHECK(n_parts_read(system, *locks, slot.memory, bytes) == (across(slot) ? 2 : 1));
        }
        CHECK(!std::all_of(slots.begin(), slots.end(), across));
        // Who reads is waited for before a piece is unlocked, and that comes before its pages go.
        locks->on_unlock(&system, [&] { system.log.push_back("settle"); });
        for (const Slot & slot : slots) {
            bank.give(slot);
        }
        system.log.clear();
        CHECK(bank.take(large));
        const auto first = std::find(system.log.begin(), system.log.end(), "settle");
        CHECK(first != system.log.end() && first[1] == "unlock");
        CHECK(std::find(system.log.begin(), first, "unlock") == first);
    }
    CHECK(system.locked.empty());
}

void a_system_that_locks_no_more_is_not_asked_again() {
    const ModelMap map = synthetic_map(path, 1, 128, [](int) { return 1 << 15; });
    System         system;
    system.refuses_after = 1;
    const auto locks     = system.locks();
    HostBank   bank(map, map.slots_bytes(), locks);
    int        n_read = 0, n = 0;
    while (Slot slot = bank.take(bank.size_class(0, PART_MATRICES))) {
        n_read += n_parts_read(system, *locks, slot.memory, map.layers[0].expert_bytes()) > 0;
        ++n;
    }
    CHECK(n == 128 && 0 < n_read && n_read < n);
    CHECK(std::count(system.log.begin(), system.log.end(), "lock") == 2);
}

} // namespace

int main(int argc, char ** argv) {
    return run(argc, argv,
        { areas_hold_nothing_of_another_kind, all_experts_have_slots_where_the_budget_is_what_they_take,
            layers_share_at_most_four_times_as_many_slots_as_one_of_them_has_experts,
            a_device_reads_what_is_locked_until_its_memory_goes, a_system_that_locks_no_more_is_not_asked_again });
}
