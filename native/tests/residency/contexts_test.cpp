// Several contexts, one table:
//
//     contexts_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "residency/house.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

using namespace pyorch;

static void a_context_elsewhere_makes_no_guess_late() {
    House house(6, 0.5);
    Owner other = { &other };
    house.pass(1, { 0 });
    house.pass(other, 3, { 0 }); // has passed layer 2 long ago
    house.want(house.owner, 2, 1, { 7 });
    house.reader.read_all();
    CHECK(house.resident(2, 7));
}

static void a_guess_for_a_layer_that_its_context_has_passed_is_ignored() {
    House house(6, 0.5);
    house.pass(1, { 0 });
    house.pass(2, { 0 });
    house.want(house.owner, 2, 1, { 7 });
    house.reader.read_all();
    CHECK(!house.resident(2, 7));
}

static void a_guess_waits_for_the_pass_of_its_own_context() {
    House house(6, 0.5);
    Owner other = { &other };
    house.pass(1, { 0 });
    house.want(house.owner, 2, 1, { 7 });
    house.reader.read_all();
    house.pass(other, 2, { 3 });
    CHECK(house.stats().prefetch_wasted == 0);
    house.pass(2, { 7 });
    CHECK(house.stats().prefetch_wasted == 0 && house.stats().prefetch_hits == 1);
}

static void what_a_context_held_and_wanted_goes_with_it() {
    for (double share : { 0.0, 1.0 }) {
        House house(3, share);
        Owner other = { &other };
        house.table.acquire(other, 0, { ALL, ALL, 1 }); // aborted inside the layer, and freed
        house.reader.read_all();
        house.want(other, 2, 0, { 1, 2 });
        house.table.forget(other);
        house.reader.read_all();
        CHECK(house.n_resident(2) == 0);
        CHECK(house.pass(1, ALL)); // at the smallest budget, waits for ever if the other's experts are still held
    }
}

// A reader of which is known how many contexts wait for memory.
class WatchedReader : public LocalReader {
public:
    using LocalReader::LocalReader;

    std::atomic<int> n_waiting{ 0 };

    void wait(Mutex & mutex, CondVar & changed) override REQUIRES(mutex) {
        ++n_waiting;
        changed.wait(mutex);
        --n_waiting;
    }
};

// Two contexts come to layers 0 and 1, which lack memory while a reader holds some, and while they sleep something is
// asked for. Both must get through.
template <typename Meanwhile>
static void contexts_wait_for_no_circle(int kept, int each, int n_reading, Meanwhile meanwhile) {
    House house(4, 0.5); // 32 experts
    house.pass(3, range(0, kept));
    house.table.set_limits(3, kept, House::N_EXPERT);
    house.pass(0, range(0, each));
    std::vector<ReadRequest> reading;
    WatchedReader            reader(house.table.loader());
    for (auto [layer, n] : { std::pair(1, each), std::pair(2, n_reading) }) {
        house.table.prefetch(house.map.layers[layer].il, ALL.data(), n);
    }
    for (ReadRequest request; house.table.loader().try_next(request);) {
        reading.push_back(request);
    }
    CHECK(house.stats().used_bytes == house.stats().budget_bytes);
    std::atomic<int> n_done{ 0 };
    auto             run = [&](int layer) {
        Owner owner = { &owner };
        house.table.acquire(owner, layer, { ALL, ALL, 1 });
        for (int id : ALL) {
            CHECK(house.table.address(owner, layer, id, 2, true));
        }
        CHECK(house.table.release(owner));
        house.table.forget(owner);
        ++n_done;
    };
    // That they meet is likely, not certain: what must hold, holds in any order. By the clock, because a yield takes
    // a thousand times longer where other processes want the processor.
    auto let_wait = [&](int n) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
        while (reader.n_waiting < n && std::chrono::steady_clock::now() < until) {
            std::this_thread::yield();
        }
    };
    std::thread first(run, 0);
    let_wait(1);
    std::thread second(run, 1);
    let_wait(2);
    meanwhile(house);
    for (const ReadRequest & request : reading) {
        house.table.loader().finish(request, (int64_t) request.size, 1);
    }
    while (n_done < 2) {
        reader.read_all();
        std::this_thread::yield();
    }
    first.join();
    second.join();
    CHECK(house.stats().used_bytes <= house.stats().budget_bytes);
}

static void contexts_wait_for_no_circle_beside_a_minimum() {
    contexts_wait_for_no_circle(8, 12, 0, [](House &) {});
}

static void contexts_wait_for_no_circle_under_a_lowered_budget() {
    contexts_wait_for_no_circle(0, 8, 16, [](House & house) { house.table.set_budget(house.map.floor_bytes()); });
}

static void contexts_wait_for_no_circle_while_pins_and_minima_are_raised() {
    contexts_wait_for_no_circle(0, 8, 16, [](House & house) {
        const int32_t pinned[] = { 0, 1, 2, 3 };
        house.table.pin(house.map.layers[2].il, pinned, 4);
        house.table.pin(house.map.layers[0].il, pinned, 4);
        house.table.set_limits(1, 4, House::N_EXPERT);
        house.table.set_limits(3, 4, House::N_EXPERT);
    });
}

// What is counted, is counted once, however often a context has to wait.
static void a_layer_that_waits_is_counted_once() {
    House         house(4, 0); // the experts of one layer
    WatchedReader reader(house.table.loader());
    Owner         other = { &other };
    house.table.acquire(house.owner, 0, { ALL, ALL, 1 });
    std::thread waits([&] {
        house.table.acquire(other, 1, { ALL, ALL, 1 });
        house.table.release(other);
    });
    while (reader.n_waiting == 0) {
        std::this_thread::yield();
    }
    for (int i = 0; i < 3; ++i) { // it wakes in vain
        const int32_t none[] = { 0 };
        house.table.evict(house.map.layers[2].il, none, 1);
    }
    house.table.release(house.owner);
    waits.join();
    reader.read_all();
    CHECK(house.stats().layer_passes == 2 && house.stats().tokens == 2);
    CHECK(house.stats().misses == 32 && house.stats().hits == 0);
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            a_context_elsewhere_makes_no_guess_late,
            a_guess_for_a_layer_that_its_context_has_passed_is_ignored,
            a_guess_waits_for_the_pass_of_its_own_context,
            what_a_context_held_and_wanted_goes_with_it,
            contexts_wait_for_no_circle_beside_a_minimum,
            contexts_wait_for_no_circle_under_a_lowered_budget,
            contexts_wait_for_no_circle_while_pins_and_minima_are_raised,
            a_layer_that_waits_is_counted_once,
        });
}
