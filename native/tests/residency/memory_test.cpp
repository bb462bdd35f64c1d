// The memory of experts: size classes, and a budget that changes:
//
//     memory_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "residency/house.h"

#include <random>
#include <sys/resource.h>

using namespace pyorch;

static void loads_of_several_sizes_take_no_fresh_pages_once_the_memory_is_shared_out() {
    House        house(4, 0.5, PYORCH_LRU, [](int layer) { return layer % 2 ? LARGE : LARGE / 2; });
    std::mt19937 rng(3);
    auto         token = [&] {
        for (int layer = 0; layer < 4; ++layer) {
            const int first = (int) (rng() % 15);
            house.pass(layer, { first, first + 1 });
        }
    };
    for (int i = 0; i < 200; ++i) {
        token();
    }
    rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    house.table.reset_stats();
    for (int i = 0; i < 200; ++i) {
        token();
    }
    getrusage(RUSAGE_SELF, &after);
    const pyorch_stats stats = house.stats();
    const double       pages = (double) stats.bytes_read / PAGE;
    CHECK(stats.loads > 300 && stats.peak_bytes <= stats.budget_bytes);
    CHECK((double) (after.ru_minflt - before.ru_minflt) < 0.1 * pages);
}

static void memory_is_fresh_for_who_writes_there_first() {
    House          house(1, 1.0, PYORCH_LRU, [](int) { return LARGE; });
    HostBank       bank(house.map, 4 * house.map.layers[0].slot_bytes());
    const int      size_class = bank.size_class(0, PART_MATRICES);
    const uint64_t budget     = bank.budget();
    const Slot     first      = bank.take(size_class);
    CHECK(first.fresh);
    bank.give(first);
    CHECK(!bank.take(size_class).fresh && bank.take(size_class).fresh);
    bank.give(first);
    bank.set_budget(budget / 4, 0); // what was given back loses its memory
    bank.set_budget(budget, 0);
    CHECK(bank.take(size_class).fresh);
}

static void memory_follows_the_size_class_that_lacks_it() {
    House house(4, 0.5, PYORCH_LRU, [](int layer) { return layer % 2 ? LARGE : LARGE / 2; });
    auto  shift = [&](int from) {
        for (int i = 0; i < 400; ++i) {
            for (int layer = from; layer < 4; layer += 2) {
                house.pass(layer, { i % 15, i % 15 + 1 });
            }
        }
    };
    shift(1);
    const int large = house.n_resident(1) + house.n_resident(3);
    CHECK(house.n_resident(0) + house.n_resident(2) == 0);
    shift(0);
    CHECK(house.n_resident(0) == 16 && house.n_resident(2) == 16); // the small ones all fit
    CHECK(house.n_resident(1) + house.n_resident(3) < large);
    shift(1);
    CHECK(house.n_resident(1) + house.n_resident(3) == large && house.stats().peak_bytes <= house.stats().budget_bytes);
}

static void a_whole_layer_of_any_size_fits_into_the_smallest_budget() {
    House house(3, 0, PYORCH_LRU, [](int layer) { return layer == 1 ? LARGE / 8 : LARGE / 16; });
    for (int round = 0; round < 3; ++round) {
        for (int layer = 0; layer < 3; ++layer) {
            CHECK(house.pass(layer, ALL, 64));
            CHECK(house.n_resident(layer) == 16);
        }
    }
    CHECK(house.stats().budget_bytes == house.map.floor_bytes() && house.stats().peak_bytes <= house.map.floor_bytes());
}

static void a_budget_can_shrink_and_grow() {
    House house(4, 1, PYORCH_LRU, [](int layer) { return layer % 2 ? LARGE / 8 : LARGE / 16; });
    for (int layer = 0; layer < 4; ++layer) {
        house.pass(layer, ALL, 64);
    }
    const uint64_t whole = house.stats().budget_bytes;
    CHECK(house.stats().used_bytes == whole);
    house.table.set_budget(house.map.floor_bytes());
    CHECK(house.stats().used_bytes <= house.map.floor_bytes());
    house.table.set_budget(whole);
    for (int layer = 0; layer < 4; ++layer) {
        house.pass(layer, ALL, 64);
    }
    CHECK(house.stats().resident_experts == 64 && house.stats().used_bytes == whole);
}

// What running layers hold above a lowered budget is given back when they end.
static void a_lowered_budget_holds_once_the_running_layers_end() {
    House house(4, 0.5);
    Owner other = { &other };
    house.table.acquire(house.owner, 0, { ALL, ALL, 1 });
    house.table.acquire(other, 1, { ALL, ALL, 1 });
    house.reader.read_all();
    house.table.set_budget(house.map.floor_bytes());
    CHECK(house.stats().used_bytes > house.map.floor_bytes());
    CHECK(house.table.release(house.owner) && house.table.release(other));
    CHECK(house.stats().used_bytes <= house.map.floor_bytes());
    CHECK(house.stats().budget_bytes == house.map.floor_bytes());
}

// The same of what was on its way.
static void a_lowered_budget_holds_once_the_reads_end() {
    House                    house(4, 0.5);
    std::vector<ReadRequest> reading;
    for (int layer : { 0, 1 }) {
        house.table.prefetch(house.map.layers[layer].il, ALL.data(), (int) ALL.size());
    }
    for (ReadRequest request; house.table.loader().try_next(request);) {
        reading.push_back(request);
    }
    house.table.set_budget(house.map.floor_bytes());
    for (const ReadRequest & request : reading) {
        house.table.loader().finish(request, (int64_t) request.size, 1);
    }
    house.reader.read_all();
    CHECK(house.stats().used_bytes <= house.map.floor_bytes());
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            loads_of_several_sizes_take_no_fresh_pages_once_the_memory_is_shared_out,
            memory_is_fresh_for_who_writes_there_first,
            memory_follows_the_size_class_that_lacks_it,
            a_whole_layer_of_any_size_fits_into_the_smallest_budget,
            a_budget_can_shrink_and_grow,
            a_lowered_budget_holds_once_the_running_layers_end,
            a_lowered_budget_holds_once_the_reads_end,
        });
}
