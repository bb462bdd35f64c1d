// What is read ahead: orders, pins, prompts, guesses:
//
//     ahead_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "residency/house.h"

using namespace pyorch;

static void a_pin_of_what_is_read_on_a_guess_survives_the_pass() {
    House house(3, 0.5);
    house.pass(1, { 0 });
    house.want(house.owner, 2, 1, { 7 });
    CHECK(house.reader.read_one()); // one matrix of three
    const int32_t pinned[] = { 7 };
    house.table.pin(house.map.layers[2].il, pinned, 1);
    house.pass(2, { 0 });
    house.reader.read_all();
    CHECK(house.resident(2, 7));
}

static void only_reads_that_layers_wait_for_keep_the_disk_from_others() {
    House      house(3, 0.9);
    const auto busy = [&] {
        double queued, expert, share;
        CHECK(house.table.read_time(1, queued, expert, share) && queued == 0 && expert > 0);
        return share;
    };
    house.table.prefetch(house.map.layers[0].il, ALL.data(), (int) ALL.size());
    house.reader.read_all();
    CHECK(busy() == 0);
    house.pass(1, { 3, 5 });
    const double first = busy();
    CHECK(first > 0 && first <= 1);
    while (busy() > first / 2) { // time passes
    }
}

static void a_pin_takes_memory_from_what_was_read_ahead() {
    House house(4, 0.5);
    for (int layer : { 0, 1 }) {
        house.table.prefetch(house.map.layers[layer].il, ALL.data(), (int) ALL.size());
    }
    house.reader.read_all();
    CHECK(house.stats().resident_experts == 32); // all that fits, and nothing of it was used
    const int32_t pinned[] = { 4, 9 };
    house.table.pin(house.map.layers[2].il, pinned, 2);
    house.reader.read_all();
    CHECK(house.resident(2, 4) && house.resident(2, 9));
}

// A reader sleeps while a thread of the decode stage ends what it read: memory is there then for what waits.
static void who_decodes_the_last_that_keeps_an_order_waiting_wakes_the_reader() {
    struct Woken : LocalReader {
        using LocalReader::LocalReader;

        bool woken = false;
        void wake() override { woken = true; }
    };
    House house(4, 0.5);
    Woken reader(house.table.loader());
    for (int layer : { 0, 1 }) {
        house.table.prefetch(house.map.layers[layer].il, ALL.data(), (int) ALL.size());
    }
    std::vector<ReadRequest> read; // and not decoded: all of the budget is on its way
    for (ReadRequest request; house.table.loader().try_next(request);) {
        CHECK(house.table.loader().read(request, (int64_t) request.size, 1));
        read.push_back(request);
    }
    CHECK(read.size() == 3 * 32 && read[0].load == read[2].load);
    const int32_t pinned[] = { 4 };
    house.table.pin(house.map.layers[2].il, pinned, 1);
    ReadRequest request;
    CHECK(!house.table.loader().try_next(request)); // sleeps
    reader.woken = false;
    for (int i = 0; i < 3; ++i) {
        CHECK(!reader.woken);
        house.table.loader().decode(read[i]);
    }
    CHECK(reader.woken);
    CHECK(house.table.loader().try_next(request) && request.load->layer == 2 && request.load->expert == 4);
    house.table.loader().finish(request, (int64_t) request.size, 1);
    house.reader.read_all();
    for (size_t i = 3; i < read.size(); ++i) {
        house.table.loader().decode(read[i]);
    }
    CHECK(house.resident(2, 4));
}

static void what_a_prompt_wanted_and_never_read_is_no_scan_afterwards() {
    House house(3, 0.5);
    house.table.acquire(house.owner, 0, { ALL, ALL, 64 }); // layer 1 is wanted ahead
    house.table.release(house.owner);
    house.pass(2, ALL, 64); // and now it is not
    house.pass(2, ALL);
    house.pass(0, range(0, 8));
    const int32_t last[] = { 15 };
    house.table.evict(house.map.layers[2].il, last, 1);
    house.want(house.owner, 1, 0, { 7 });
    house.reader.read_all();
    CHECK(house.resident(1, 7));
    house.pass(2, { 15 });
    CHECK(house.resident(1, 7)); // there is something else that may go
}

static void a_pin_that_waits_for_memory_survives_a_prompt() {
    House         house(3, 0.7);
    const int32_t pinned[] = { 4, 9 };
    house.table.pin(house.map.layers[2].il, pinned, 2);
    house.table.acquire(house.owner, 0, { ALL, ALL, 64 });
    house.table.release(house.owner);
    house.reader.read_all();
    CHECK(house.resident(2, 4) && house.resident(2, 9));
    house.pass(0, ALL, 64);
    house.pass(1, ALL, 64);
    CHECK(house.resident(2, 4) && house.resident(2, 9));
}

static void a_prompt_reads_the_next_layer_ahead_but_none_that_no_decode_executes() {
    for (bool told : { false, true }) {
        House house(3, 1);
        if (told) {
            house.table.set_executed({ 0, 1 });
        }
        house.pass(0, ALL, 64);
        CHECK(house.n_resident(1) == 16);
        house.pass(1, ALL, 64);
        CHECK(house.n_resident(2) == (told ? 0 : 16));
        house.want(house.owner, 2, 1, { 1 });
        house.reader.read_all();
        CHECK(house.n_resident(2) == (told ? 0 : 16));
    }
}

static void nobody_waits_for_reads_that_nobody_makes() {
    const ModelMap map = synthetic_map(path, 2, House::N_EXPERT, [](int) { return SMALL; });
    Table          table(
        map, std::make_unique<HostBank>(map, map.slots_bytes()), call_source(touch_pages, nullptr), plain_codec(), {});
    table.prefetch(map.layers[0].il, ALL.data(), (int) ALL.size());
    table.wait_idle();
    pyorch_stats stats = {};
    table.add_stats(-1, stats);
    CHECK(stats.loads == 0);
}

static void a_late_hit_is_a_hit_and_no_waste() {
    House house(3, 0.5);
    house.pass(0, { 0 });
    house.want(house.owner, 1, 0, { 7, 8 });
    CHECK(house.reader.read_one()); // of expert 7, one matrix of three
    house.pass(1, { 7 });
    house.pass(2, { 0 });
    house.pass(0, { 0 });
    house.pass(1, { 7 });
    const pyorch_stats stats = house.stats();
    CHECK(stats.prefetch_hits == 1 && stats.prefetch_late == 1 && stats.prefetch_wasted == 0 &&
        stats.prefetch_loads == 1);
}

static void a_guess_takes_nothing_that_the_last_token_used() {
    House house(2, 0.5);
    house.pass(0, range(0, 8));
    house.pass(1, range(0, 8)); // now the budget is full of the last token
    house.want(house.owner, 0, 1, { 12 });
    house.reader.read_all();
    CHECK(!house.resident(0, 12) && house.stats().evictions == 0);
    house.pass(0, range(4, 8)); // 0 to 3 were not used again
    house.want(house.owner, 1, 0, { 12 });
    house.reader.read_all();
    CHECK(house.resident(1, 12) && house.stats().evictions == 1 && house.n_resident(0) == 7);
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            only_reads_that_layers_wait_for_keep_the_disk_from_others,
            a_pin_of_what_is_read_on_a_guess_survives_the_pass,
            a_pin_takes_memory_from_what_was_read_ahead,
            who_decodes_the_last_that_keeps_an_order_waiting_wakes_the_reader,
            what_a_prompt_wanted_and_never_read_is_no_scan_afterwards,
            a_pin_that_waits_for_memory_survives_a_prompt,
            a_prompt_reads_the_next_layer_ahead_but_none_that_no_decode_executes,
            nobody_waits_for_reads_that_nobody_makes,
            a_late_hit_is_a_hit_and_no_waste,
            a_guess_takes_nothing_that_the_last_token_used,
        });
}
