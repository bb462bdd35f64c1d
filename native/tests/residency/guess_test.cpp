// What a guess may cost those who demand:
//
//     guess_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "check.h"
#include "synthetic.h"

#include "banks/host_bank.h"
#include "residency/table.h"

#include <algorithm>
#include <functional>
#include <map>
#include <random>

using namespace pyorch;

static constexpr uint64_t SMALL_REQUEST = 512u << 10;

// Three layers of four experts of 3 MiB, and a disk whose requests end when they are told to.
struct House {
    static constexpr int N_EXPERT = 4;

    // lacking: an expert of each layer that no file has; -1: none.
    explicit House(
        int budget_in_experts, std::unique_ptr<Source> source = call_source(touch_pages, nullptr), int lacking = -1) :
            map(share(synthetic_map(path, 3, N_EXPERT, [](int) { return 32768; }), lacking)),
            table(map, std::make_unique<HostBank>(map, budget_in_experts * map.layers[0].slot_bytes()),
                std::move(source), plain_codec(), {}),
            disk(table.loader()) {}

    struct Disk : Reader {
        using Reader::Reader;

        bool take(ReadRequest & request) { return loader.try_next(request); }
        void end(const ReadRequest & request) {
            loader.finish(request, (int64_t) request.size, (uint64_t) ((double) request.size * ns_per_byte));
        }
        int layer_of(const ReadRequest & request) { return request.load->layer; }

        void wait(Mutex & mutex, CondVar &) override REQUIRES(mutex) {
            MutexUnlock unlock(mutex);
            CHECK(while_short);
            while_short();
        }

        std::function<void()> while_short;
        double                ns_per_byte = 1; // half a millisecond are less than the least request
    };

    static ModelMap share(ModelMap whole, int lacking) {
        for (MoeLayer & layer : whole.layers) {
            PackedLayer pack = { 0, {}, {}, std::vector<bool>(3), std::vector<bool>(3) };
            for (int e = 0; e < N_EXPERT; ++e) {
                pack.offset.push_back(e == lacking ? NOWHERE : e * layer.slot_bytes());
            }
            if (lacking >= 0) {
                layer.pack = std::make_shared<PackedLayer>(std::move(pack));
            }
        }
        return whole;
    }

    const ModelMap map;
    Table          table;
    Disk           disk;
    Owner          owner = { this };

    void acquire(Owner & who, int layer, const std::vector<int> & experts) {
        table.acquire(who, layer, { experts, experts, 1 });
    }

    int read_all() {
        ReadRequest request;
        int         n = 0;
        for (; disk.take(request); ++n) {
            disk.end(request);
        }
        return n;
    }

    void pass(Owner & who, int layer, const std::vector<int> & experts) {
        acquire(who, layer, experts);
        read_all();
        CHECK(table.release(who));
    }

    void guess(const Owner & who, int layer, int expert) {
        std::vector<Table::Want> wants = { { expert, 0.5, true, false } };
        table.want(who.context, layer, layer - 1, wants);
    }

    pyorch_stats stats() {
        pyorch_stats all = {};
        table.add_stats(-1, all);
        return all;
    }

    bool loading(int layer, int expert) { return is(PYORCH_LOADING, layer, expert); }
    bool resident(int layer, int expert) { return is(PYORCH_RESIDENT, layer, expert); }

    bool is(int state, int layer, int expert) {
        uint8_t mask[N_EXPERT];
        table.get_residency(map.layers[layer].il, mask, N_EXPERT);
        return mask[expert] & state;
    }
};

static void a_guess_is_read_one_small_request_at_a_time_on_an_idle_disk() {
    House house(12);
    house.acquire(house.owner, 0, { 0 });
    house.guess(house.owner, 1, 1);
    ReadRequest demanded, guessed, other;
    while (house.disk.take(demanded) && house.disk.layer_of(demanded) == 0) {
        CHECK(!house.disk.take(other) ||
            house.disk.layer_of(other) == 0); // several demands at once, no guess beside them
        house.disk.end(demanded);
        if (other.load) {
            house.disk.end(other);
            other = {};
        }
    }
    guessed = demanded;
    CHECK(house.disk.layer_of(guessed) == 1 && guessed.size <= SMALL_REQUEST);
    CHECK(!house.disk.take(other)); // one at a time
    house.disk.end(guessed);
    CHECK(house.disk.take(guessed) && house.disk.layer_of(guessed) == 1);
    house.disk.end(guessed);
    CHECK(house.table.release(house.owner));
}

// Of a file system that wants whole pages.
struct Direct : Source {
    int64_t read(int, uint64_t, void *, uint64_t) override { return -1; }
    bool    direct(int) const override { return true; }
};

static void requests_of_guesses_are_whole_pages_however_fast_the_disk_is() {
    for (const double ns_per_byte : { 1.0, 0.7, 0.51, 0.33, 0.1, 0.01 }) {
        House house(12, std::make_unique<Direct>());
        house.disk.ns_per_byte = ns_per_byte;
        house.pass(house.owner, 0, { 0 });
        house.guess(house.owner, 1, 1);
        int n = 0;
        for (ReadRequest guessed; house.disk.take(guessed); ++n) {
            CHECK(guessed.direct && (guessed.offset | guessed.size | (uintptr_t) guessed.buf) % PAGE == 0);
            house.disk.end(guessed);
        }
        CHECK(n > 0 && house.resident(1, 1));
    }
}

static void a_demand_waits_for_one_small_request_of_a_guess_at_most() {
    House house(12);
    house.pass(house.owner, 0, { 0 });
    house.guess(house.owner, 1, 1);
    ReadRequest guessed, demanded;
    CHECK(house.disk.take(guessed) && guessed.size <= SMALL_REQUEST);
    house.acquire(house.owner, 1, { 2 });
    house.disk.end(guessed);
    CHECK(house.disk.take(demanded) && demanded.load->expert == 2);
    house.disk.end(demanded);
    house.read_all();
    CHECK(house.table.release(house.owner));
}

static void a_guess_whose_pass_went_without_it_is_read_no_further() {
    House house(12);
    house.pass(house.owner, 0, { 0 });
    house.pass(house.owner, 1, { 0 });
    house.pass(house.owner, 0, { 0 });
    const uint64_t before = house.stats().bytes_read;
    house.guess(house.owner, 1, 1);
    ReadRequest guessed;
    CHECK(house.disk.take(guessed));
    house.acquire(house.owner, 1, { 0 });
    CHECK(house.loading(1, 1)); // a reader is at it
    house.disk.end(guessed);
    CHECK(!house.loading(1, 1) && house.read_all() == 0 && house.stats().bytes_read == before + guessed.size);
    CHECK(house.table.release(house.owner));
    const pyorch_stats stats = house.stats();
    CHECK(stats.prefetch_wasted == 1 && stats.prefetch_loads == 0 && stats.prefetch_hits == 0);
    CHECK(stats.resident_experts == 2);
}

static void an_abandoned_guess_goes_on_for_who_needs_it_after_all() {
    House house(12);
    Owner other = { &other };
    house.pass(house.owner, 0, { 0 });
    house.guess(house.owner, 1, 1);
    ReadRequest guessed;
    CHECK(house.disk.take(guessed));
    house.pass(house.owner, 1, {});
    house.acquire(other, 1, { 1 });
    house.disk.end(guessed);
    house.read_all();
    CHECK(house.table.address(other, 1, 1, 2, false));
    CHECK(house.table.release(other));
    CHECK(house.stats().bytes_read == 2 * 3u * (1u << 20)); // each byte once
}

static void an_abandoned_guess_goes_on_where_it_is_pinned_or_asked_for_by_name() {
    for (bool pinned : { false, true }) {
        House house(12);
        house.pass(house.owner, 0, { 0 });
        house.guess(house.owner, 1, 1);
        ReadRequest guessed;
        CHECK(house.disk.take(guessed));
        house.pass(house.owner, 1, { 0 });
        const int32_t asked[] = { 1 };
        if (pinned) {
            house.table.pin(house.map.layers[1].il, asked, 1);
        } else {
            house.table.prefetch(house.map.layers[1].il, asked, 1);
        }
        house.disk.end(guessed);
        house.read_all();
        CHECK(house.resident(1, 1));
        CHECK(house.stats().bytes_read == 3 * 3u * (1u << 20)); // each byte once
    }
}

static void who_lacks_memory_gets_that_of_a_guess_under_way() {
    House house(4);
    Owner other = { &other };
    house.pass(house.owner, 0, { 0 });
    house.acquire(other, 0, { 0, 1 }); // held: two experts are left
    house.read_all();
    house.guess(house.owner, 1, 1);
    ReadRequest guessed;
    CHECK(house.disk.take(guessed));
    bool ended             = false;
    house.disk.while_short = [&] {
        CHECK(!ended); // once: then there is room, and no other guess takes it
        house.disk.end(guessed);
        ended = true;
    };
    house.acquire(house.owner, 2, { 0, 1 });
    CHECK(ended && house.loading(2, 0) && house.loading(2, 1) && !house.loading(1, 1));
    house.read_all();
    CHECK(house.table.release(house.owner) && house.table.release(other));
}

static void what_a_tier_above_has_is_not_guessed() {
    House house(12);
    house.pass(house.owner, 0, { 0 });
    house.table.set_above(1, { 1, 0, 0, 0 });
    std::vector<Table::Want> wants = { { 0, 0.5, true, false }, { 1, 0.5, true, false } };
    house.table.want(house.owner.context, 1, 0, wants);
    CHECK(!wants[0].absent && wants[1].absent);
    house.table.set_above(1, { 1, 1, 0, 0 }); // it comes there before it was read here
    CHECK(house.read_all() == 0 && !house.resident(1, 0) && !house.resident(1, 1));
    house.table.set_above(1, { 0, 0, 0, 0 });
    house.guess(house.owner, 1, 1);
    CHECK(house.read_all() > 0 && house.resident(1, 1));
}

// FineMoE, section 4.5: PRI = p / (l - l_now), the highest first.
static void guesses_are_taken_by_their_probability_over_their_distance() {
    std::mt19937 rng(1);
    for (int round = 0; round < 200; ++round) {
        Guesses                               guesses;
        const auto                            distance = [](const void *, int layer) { return layer + 1; };
        std::map<std::pair<int, int>, double> wanted; // by layer and expert
        const int                             n_layers = 1 + (int) (rng() % 5), n_expert = 1 + (int) (rng() % 6);
        for (int layer = 0; layer < n_layers; ++layer) {
            std::vector<Guess> of_layer;
            for (int expert = 0; expert < n_expert; ++expert) {
                of_layer.push_back({ expert, (double) rng() / (double) rng.max() });
                wanted[{ layer, expert }] = of_layer.back().probability / (layer + 1);
            }
            guesses.replace(nullptr, layer, of_layer);
        }
        while (!wanted.empty()) {
            const auto best = std::max_element(
                wanted.begin(), wanted.end(), [](const auto & a, const auto & b) { return a.second < b.second; });
            const auto taken = guesses.take_best(distance);
            CHECK(taken.layer == best->first.first && taken.guess.expert == best->first.second);
            wanted.erase(best);
        }
        CHECK(guesses.empty());
    }
}

static void what_no_file_has_is_neither_guessed_nor_read_behind_everything_else() {
    for (const int lacking : { -1, 1 }) {
        for (const int how : { 0, 1, 2, 3 }) {
            House house(12, call_source(touch_pages, nullptr), lacking);
            if (how & 1) { // a server that had it is lost
                house.table.set_elsewhere(1, std::vector<uint8_t>(House::N_EXPERT));
            }
            if (how & 2) {
                house.guess(house.owner, 1, 1);
            } else {
                house.table.defer(1, { 1 });
            }
            ReadRequest request;
            CHECK(house.disk.take(request) == (lacking < 0));
            CHECK(house.loading(1, 1) == (lacking < 0));
            if (lacking < 0) {
                house.disk.end(request);
                house.read_all();
            }
        }
    }
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            a_guess_is_read_one_small_request_at_a_time_on_an_idle_disk,
            requests_of_guesses_are_whole_pages_however_fast_the_disk_is,
            a_demand_waits_for_one_small_request_of_a_guess_at_most,
            a_guess_whose_pass_went_without_it_is_read_no_further,
            an_abandoned_guess_goes_on_for_who_needs_it_after_all,
            an_abandoned_guess_goes_on_where_it_is_pinned_or_asked_for_by_name,
            who_lacks_memory_gets_that_of_a_guess_under_way,
            what_a_tier_above_has_is_not_guessed,
            guesses_are_taken_by_their_probability_over_their_distance,
            what_no_file_has_is_neither_guessed_nor_read_behind_everything_else,
        });
}
