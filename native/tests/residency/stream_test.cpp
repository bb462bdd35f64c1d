// Layers whose experts do not fit into the budget together:
//
//     stream_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "residency/house.h"

#include <atomic>

using namespace pyorch;

// Layers of which a budget of 5 experts at least must do.
struct Narrow : House {
    explicit Narrow(double share, const Codec & codec = plain_codec()) :
            House(3, share, PYORCH_LRU, [](int) { return SMALL; }, codec, 2) {}

    uint64_t expert_bytes() const { return map.layers[0].expert_bytes(); }

    // As mul_mat_id with so many compute threads, one of which is ahead of the others as far as may be. Returns how far
    // that was.
    int compute(int layer, const std::vector<int> & experts, int n_threads = 2, std::vector<int> roles = { 0, 1, 2 }) {
        const std::vector<char> threads(n_threads);
        auto                    address = [&](int thread, int expert, int role) {
            return table.address(owner, layer, expert, role, false, &threads[thread]);
        };
        owner.n_threads = n_threads;
        int most        = 0;
        for (int role : roles) {
            size_t first = 0;
            for (size_t last = 0; last < experts.size(); ++last) {
                reader.read_all(); // what has room
                while (first < experts.size() && address(0, experts[first], role)) {
                    ++first;
                }
                most = std::max(most, (int) (first - last));
                for (int thread = 1; thread < n_threads; ++thread) {
                    while (!address(thread, experts[last], role)) {
                        CHECK(reader.read_one());
                    }
                }
            }
            while (first < experts.size()) {
                if (address(0, experts[first], role)) {
                    ++first;
                } else {
                    CHECK(reader.read_one());
                }
            }
        }
        return most;
    }
};

static void a_layer_that_does_not_fit_is_streamed_and_each_matrix_read_once() {
    for (int n_threads : { 2, 3, 7 }) {
        Narrow house(0);
        CHECK(house.map.floor_bytes() == 5 * house.map.layers[0].slot_bytes());
        for (int layer = 0; layer < 3; ++layer) {
            house.table.acquire(house.owner, layer, { ALL, ALL, 64 });
            const int ahead = house.compute(layer, ALL, n_threads);
            CHECK(ahead >= 1 && ahead <= 5); // what a thread still computes with is not overwritten
            CHECK(house.table.release(house.owner));
        }
        const pyorch_stats stats = house.stats();
        CHECK(stats.bytes_read == 3 * 16 * house.expert_bytes());
        CHECK(stats.misses == 48 && stats.loads == 48 && stats.resident_experts == 0);
        CHECK(stats.peak_bytes <= house.map.floor_bytes());
    }
}

static void what_a_streamed_layer_finds_in_memory_is_not_read_again() {
    Narrow house(0.2); // 9 experts, 5 of them for the window
    house.pass(0, { 3, 7 });
    house.table.acquire(house.owner, 0, { ALL, ALL, 64 });
    house.compute(0, ALL);
    CHECK(house.table.release(house.owner) && house.resident(0, 3) && house.resident(0, 7));
    CHECK(house.stats().hits == 2 && house.stats().peak_bytes <= house.stats().budget_bytes);
    // What the next layer needs was read ahead beside the window, and not more than fits beside its own.
    const pyorch_stats first = house.stats();
    CHECK(house.n_resident(1) > 0);
    house.table.acquire(house.owner, 1, { ALL, ALL, 64 });
    house.compute(1, ALL);
    CHECK(house.table.release(house.owner));
    pyorch_stats of_layer = {};
    house.table.add_stats(1, of_layer);
    CHECK(of_layer.bytes_read == 16 * house.expert_bytes() && of_layer.hits > 0 && first.prefetch_wasted == 0);
}

static void a_graph_that_takes_the_matrices_in_another_order_is_streamed_too() {
    Narrow house(0);
    for (int pass = 0; pass < 2; ++pass) {
        house.table.reset_stats();
        house.table.acquire(house.owner, 0, { ALL, ALL, 64 });
        house.compute(0, ALL, 2, { 1, 0, 2 });
        CHECK(house.table.release(house.owner));
    }
    CHECK(house.stats().bytes_read == 16 * house.expert_bytes()); // now it is known
}

static void a_stream_that_is_aborted_gives_its_window_back() {
    for (int n_reading : { 0, 1, 3 }) {
        Narrow house(0);
        Owner  other = { &other };
        house.table.acquire(other, 0, { ALL, ALL, 64 });
        std::vector<ReadRequest> reading(n_reading);
        for (ReadRequest & request : reading) {
            CHECK(house.table.loader().try_next(request));
        }
        house.table.forget(other);
        ReadRequest more;
        CHECK(!house.table.loader().try_next(more)); // what no reader had begun is not read
        for (const ReadRequest & request : reading) {
            house.table.loader().finish(request, (int64_t) request.size, 1);
        }
        house.table.acquire(house.owner, 1, { ALL, ALL, 64 }); // needs all of the budget
        house.compute(1, ALL);
        CHECK(house.table.release(house.owner));
    }
}

static void a_read_error_ends_a_stream_with_its_sentence() {
    static std::atomic<int> n_decoded;
    class DamagedOnce : public Codec {
    public:
        const char * decode(const ExpertTensor &, char *, char * read) const override {
            return ++n_decoded == 20 ? nullptr : read;
        }
    };
    static const DamagedOnce damaged;
    n_decoded = 0;
    Narrow house(0, damaged);
    house.table.acquire(house.owner, 0, { ALL, ALL, 64 });
    house.compute(0, ALL); // zeros, where nothing could be read
    CHECK(!house.table.release(house.owner) && house.owner.error.find("damaged") != std::string::npos);
    CHECK(house.stats().failures == 1 && house.stats().bytes_read < 16 * house.expert_bytes());
    house.table.acquire(house.owner, 0, { ALL, ALL, 64 });
    house.compute(0, ALL);
    CHECK(house.table.release(house.owner));
}

// Its minimum does not keep what it has now beside all that it needs: it would wait for ever.
static void a_layer_gives_up_its_own_for_its_own_below_its_minimum() {
    Narrow house(0.25); // 12 experts
    CHECK(house.pass(0, range(0, 6)));
    house.table.set_limits(0, 6, House::N_EXPERT);
    CHECK(house.pass(0, range(4, 14)) && house.n_resident(0) >= 10);
}

static void what_fits_is_held_whole_and_pins_and_minima_leave_room_for_a_window() {
    Narrow house(0.25);                                              // 12 experts
    CHECK(house.pass(0, range(0, 12)) && house.n_resident(0) == 12); // else it would wait to be asked for
    const int32_t pinned[] = { 0, 1, 2, 3 };
    house.table.pin(house.map.layers[1].il, pinned, 4);
    house.table.set_limits(2, 3, House::N_EXPERT);
    house.reader.read_all();
    bool refused = false;
    try {
        house.table.set_limits(2, 4, House::N_EXPERT);
    } catch (const Failure & e) {
        refused = e.status == PYORCH_BUDGET;
    }
    CHECK(refused); // 4 + 4 + 5 experts
    for (int layer : { 0, 1, 2 }) {
        house.table.acquire(house.owner, layer, { ALL, ALL, 64 });
        house.compute(layer, ALL);
        CHECK(house.table.release(house.owner));
    }
    for (int id : pinned) {
        CHECK(house.resident(1, id));
    }
    CHECK(house.stats().peak_bytes <= house.stats().budget_bytes);
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            a_layer_that_does_not_fit_is_streamed_and_each_matrix_read_once,
            what_a_streamed_layer_finds_in_memory_is_not_read_again,
            a_graph_that_takes_the_matrices_in_another_order_is_streamed_too,
            a_stream_that_is_aborted_gives_its_window_back,
            a_read_error_ends_a_stream_with_its_sentence,
            a_layer_gives_up_its_own_for_its_own_below_its_minimum,
            what_fits_is_held_whole_and_pins_and_minima_leave_room_for_a_window,
        });
}
