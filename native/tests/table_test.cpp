// What the residency table promises, one claim after another, with a reader that reads when told to:
//
//     table_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "synthetic.h"

#include "banks/host_bank.h"
#include "residency/table.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <sys/resource.h>
#include <thread>
#include <utility>

using namespace pyorch;

#define CHECK(x) \
    do { if (!(x)) { fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #x); abort(); } } while (0)

static std::string path;

static constexpr int SMALL = 64;    // rows: experts of 6 KiB
static constexpr int LARGE = 32768; // rows: experts of 3 MiB

// A table of layers with 16 experts, a context and a reader.
struct House {
    static constexpr int N_EXPERT = 16;

    template <typename Rows>
    House(int n_layers, double share, pyorch_policy policy, Rows rows, Codecs codecs = plain_codec, int n_used = 0) :
        map(synthetic_map(path, n_layers, N_EXPERT, rows, n_used)),
        table(map, std::make_unique<HostBank>(map, budget(share)), call_source(touch_pages, nullptr),
            std::move(codecs), config(share, policy)),
        reader(table.loader()) {}

    House(int n_layers, double share, pyorch_policy policy = PYORCH_LRU) :
        House(n_layers, share, policy, [](int) { return SMALL; }) {}

    const ModelMap map;
    Table          table;
    LocalReader    reader;
    Owner          owner = { this };

    uint64_t budget(double share) const {
        return std::max(map.floor_bytes(), (uint64_t) (share * (double) map.slots_bytes()));
    }

    pyorch_config config(double share, pyorch_policy policy) const {
        pyorch_config config = {};
        config.budget_bytes = budget(share);
        config.policy       = policy;
        return config;
    }

    // A pass of a context through a layer, with all its reads.
    bool pass(Owner & who, int layer, const std::vector<int> & experts, int n_tokens = 1) {
        return pass(who, layer, experts, experts, n_tokens);
    }

    bool pass(Owner & who, int layer, const std::vector<int> & experts, const std::vector<int> & asked, int n_tokens) {
        table.acquire(who, layer, { experts, asked, n_tokens });
        reader.read_all();
        return table.release(who);
    }

    bool pass(int layer, const std::vector<int> & experts, int n_tokens = 1) {
        return pass(owner, layer, experts, n_tokens);
    }

    void want(const Owner & who, int layer, int from, const std::vector<int> & experts) {
        std::vector<Table::Want> wants;
        for (int e : experts) {
            wants.push_back({ e, 0.5, true, false });
        }
        table.want(who.context, layer, from, wants);
    }

    bool resident(int layer, int expert) {
        std::vector<uint8_t> mask;
        table.resident(layer, mask);
        return mask[expert] != 0;
    }

    int n_resident(int layer) {
        pyorch_stats of_layer;
        table.get_stats(map.layers[layer].il, of_layer);
        return (int) of_layer.resident_experts;
    }

    pyorch_stats stats() {
        pyorch_stats all;
        table.get_stats(-1, all);
        return all;
    }
};

static std::vector<int> range(int begin, int end) {
    std::vector<int> ids;
    for (int id = begin; id < end; ++id) {
        ids.push_back(id);
    }
    return ids;
}

static const std::vector<int> ALL = range(0, House::N_EXPERT);

static void the_index_finds_what_a_search_of_all_finds() {
    std::mt19937 rng(1);
    const std::vector<int> n_experts = { 5, 64, 3, 17 };
    Victims victims(n_experts);
    std::vector<std::vector<double>> keys;
    for (int n : n_experts) {
        keys.emplace_back(n, Victims::NEVER);
    }
    for (int step = 0; step < 20000; ++step) {
        const int layer = (int) (rng() % n_experts.size());
        const int id    = (int) (rng() % n_experts[layer]);
        const double key = rng() % 4 == 0 ? Victims::NEVER : rng() % 7 == 0 ? Victims::SCANNED :
            (double) (rng() % 1000);
        victims.set(layer, id, FOR_GUESS, key);
        keys[layer][id] = key;
        const int  asked = (int) (rng() % n_experts.size());
        const auto least = victims.least(asked, FOR_GUESS);
        const auto found = std::min_element(keys[asked].begin(), keys[asked].end());
        CHECK(least.key == *found);
        CHECK(least.expert < 0 ? *found == Victims::NEVER : keys[asked][least.expert] == *found);
        CHECK(victims.least(asked, FOR_DEMAND).expert < 0);
    }
}

static void values_keep_the_order_of_faded_frequencies_at_any_time() {
    const auto   policy    = make_policy(PYORCH_LFU, 4);
    const double half_life = 32.0 * 4;
    std::mt19937 rng(2);
    struct Faded {
        double   frequency = 0;
        uint64_t at        = 0;
    };
    std::vector<Usage> usage(30);
    std::vector<Faded> faded(30);
    for (uint64_t now = 1; now < 4000; ++now) {
        const size_t i = std::min(rng() % 30, rng() % 30); // some more often than others
        policy->used(usage[i], now);
        faded[i] = { faded[i].frequency * std::exp2(-(double) (now - faded[i].at) / half_life) + 1, now };
        const size_t a = rng() % 30, b = rng() % 30;
        const double fa = faded[a].frequency * std::exp2(-(double) (now - faded[a].at) / half_life);
        const double fb = faded[b].frequency * std::exp2(-(double) (now - faded[b].at) / half_life);
        if (std::abs(fa - fb) > 1e-9) {
            CHECK((fa < fb) == (policy->value(usage[a], 0, false) < policy->value(usage[b], 0, false)));
        }
    }
}

static void what_was_used_longest_ago_goes_first() {
    House house(4, 0.5);
    for (int token = 0; token < 4; ++token) {
        for (int layer = 0; layer < 4; ++layer) {
            house.pass(layer, { 2 * token, 2 * token + 1 });
        }
    }
    CHECK(house.stats().evictions == 0 && house.stats().resident_experts == 32); // all that fits
    for (int layer = 0; layer < 4; ++layer) {
        house.pass(layer, { 12, 13 });
        CHECK(!house.resident(layer, 0) && !house.resident(layer, 1) && house.resident(layer, 2));
    }
    CHECK(house.stats().evictions == 8);
}

// what is learned

static void what_follows_what_is_learned_and_valued() {
    constexpr int N = 24, N_USED = 2;
    for (int n_tables : { 1, 3 }) {
        LearnedValue learned({ N, N }, N_USED, n_tables);
        for (int token = 0; token < 600; ++token) { // a cycle of 12 pairs: all are used equally often, and equally long ago
            for (int layer = 0; layer < 2; ++layer) {
                const int first = 2 * ((token + layer) % 12);
                learned.visit({ &learned, layer, true, 0, { first, first + 1 } });
            }
        }
        const int  last  = 2 * (599 % 12);
        const int  next  = (last + 2) % N;
        const auto value = learned.values(0);
        for (int e = 0; e < N; ++e) {
            CHECK(value[e] > 0 && value[e] < 1);
            CHECK(e == next || e == next + 1 || value[e] < value[next]);
        }
        CHECK(value[next] > 0.8);
    }
}

static void what_does_not_follow_on_teaches_no_table() {
    LearnedValue learned({ 16, 16 }, 2);
    auto visit = [&](const void * context, bool continues) {
        for (int layer = 0; layer < 2; ++layer) {
            learned.visit({ context, layer, continues, 0, { 1, 5 } });
        }
    };
    auto taught = [&] {
        const auto tables = learned.export_state().tables;
        return std::any_of(tables.begin(), tables.end(), [](float x) { return x != 0; });
    };
    int a, b;
    visit(&a, false);
    visit(&a, false); // another request
    visit(&b, true);  // another context, whose first visit it is
    CHECK(!taught());
    learned.forget(&b);
    visit(&b, true);
    CHECK(!taught());
    visit(&a, true);
    CHECK(taught());
    CHECK(learned.export_state().counts[5] > 0.3f); // but all of it counts as used
}

static void what_was_learned_goes_on_from_its_copy() {
    std::mt19937 rng(4);
    LearnedValue one({ 20, 13 }, 3), other({ 20, 13 }, 3);
    auto visit = [&](LearnedValue & learned, int layer, const std::vector<int> & experts) {
        learned.visit({ &learned, layer, true, 0, experts });
    };
    for (int token = 0; token < 100; ++token) {
        for (int layer = 0; layer < 2; ++layer) {
            visit(one, layer, { (int) (rng() % 4), (int) (4 + rng() % 4), (int) (8 + rng() % 5) });
        }
    }
    other.import_state(one.export_state());
    const auto a = one.export_state(), b = other.export_state();
    CHECK(a.weights == b.weights && a.counts == b.counts && a.bias == b.bias && a.tables == b.tables);
    CHECK(a.tables.size() == 2 * 3 * 20 * 20);
}

// No thread learns here: the layer that comes next does.
static void a_table_has_learned_from_all_layers_before_one_comes() {
    House house(2, 0.75, PYORCH_LEARNED); // where all fit none goes, and nothing is learned
    auto count = [&](int expert) {
        float of = 0;
        house.table.with_learned([&](LearnedValue & learned) { of = learned.export_state().counts[expert]; });
        return of;
    };
    const float before = count(3);
    house.pass(0, { 3, 4 });
    CHECK(count(3) == before);
    house.pass(1, { 3, 4 });
    CHECK(count(3) > before && count(5) < before);

    const float after = count(3);
    house.pass(0, ALL, 64); // a prompt
    const std::vector<int> one = { 0 }, nothing;
    house.table.acquire(house.owner, 1, { one, nothing, 1 }); // a warm-up
    house.table.release(house.owner);
    house.pass(0, ALL, 64);
    CHECK(count(3) == after);
    house.table.set_policy(PYORCH_LRU);
    bool refused = false;
    try {
        house.table.with_learned([](LearnedValue &) {});
    } catch (const Failure & failure) {
        refused = failure.status == PYORCH_INVALID;
    }
    CHECK(refused);
}

// Stale experts are all alike, so what goes is of the layer whose turn comes last; none that no decode passes stay.
static void where_turns_count_the_layer_whose_turn_comes_last_gives() {
    House house(4, 0.5, PYORCH_LEAST_STALE); // 32 experts
    for (int token = 0; token < 2; ++token) {
        for (int layer = 0; layer < 4; ++layer) {
            house.pass(layer, range(4 * token, 4 * token + 4));
        }
    }
    CHECK(house.stats().resident_experts == 32);
    house.pass(0, { 8, 9 });
    CHECK(house.n_resident(0) == 8); // its own go, for its own turn comes last
    house.pass(1, { 8, 9 });
    CHECK(house.n_resident(1) == 8 && house.n_resident(0) == 8 && house.n_resident(2) == 8);
    house.table.set_executed({ 0, 1, 2 });
    house.pass(2, { 8, 9 });
    CHECK(house.n_resident(2) == 10 && house.n_resident(3) == 6);
}

// size classes

static void loads_of_several_sizes_take_no_fresh_pages_once_the_memory_is_shared_out() {
    House house(4, 0.5, PYORCH_LRU, [](int layer) { return layer % 2 ? LARGE : LARGE / 2; });
    std::mt19937 rng(3);
    auto token = [&] {
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
    const double pages = (double) stats.bytes_read / PAGE;
    CHECK(stats.loads > 300 && stats.peak_bytes <= stats.budget_bytes);
    CHECK((double) (after.ru_minflt - before.ru_minflt) < 0.1 * pages);
}

static void memory_is_fresh_for_who_writes_there_first() {
    House          house(1, 1.0, PYORCH_LRU, [](int) { return LARGE; });
    HostBank       bank(house.map, 4 * house.map.layers[0].slot_bytes());
    const int      size_class = bank.size_class(0, COMPUTABLE);
    const uint64_t budget     = bank.budget();
    const Slot     first      = bank.take(size_class);
    CHECK(first.fresh);
    bank.give(first);
    CHECK(!bank.take(size_class).fresh && bank.take(size_class).fresh);
    bank.give(first);
    bank.set_budget(budget / 4); // what was given back loses its memory
    bank.set_budget(budget);
    CHECK(bank.take(size_class).fresh);
}

static void memory_follows_the_size_class_that_lacks_it() {
    House house(4, 0.5, PYORCH_LRU, [](int layer) { return layer % 2 ? LARGE : LARGE / 2; });
    auto shift = [&](int from) {
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

// several contexts

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

static void a_forecast_changes_what_goes_unless_it_comes_too_late() {
    std::vector<float> first_two(16, 0.001f);
    first_two[0] = first_two[1] = 1;
    for (bool late : { false, true }) {
        House house(2, 0.5, PYORCH_FINEMOE);
        house.pass(1, {});
        for (int i = 0; i < 16; i += 2) {
            house.pass(0, { i, i + 1 });
        }
        // Of the next pass, as layer 0 came; or of the one that layer 0 has just had, as layer 1 came before it.
        house.table.expect(house.owner.context, 0, late ? 1 : 0, first_two);
        house.pass(1, { 0, 1 });
        CHECK(house.resident(0, 0) == !late && house.resident(0, 1) == !late && house.n_resident(0) == 14);
    }
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
    House house(4, 0.5);
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

// A reader of which is known how many contexts wait for memory.
class WatchedReader : public LocalReader {
public:
    using LocalReader::LocalReader;

    std::atomic<int> n_waiting { 0 };

    void wait(std::unique_lock<std::mutex> & lock, std::condition_variable & changed) override {
        ++n_waiting;
        changed.wait(lock);
        --n_waiting;
    }
};

// Two contexts come to layers 0 and 1, which lack memory while a reader holds some, and while they sleep something is
// asked for. Both must get through.
template <typename Meanwhile>
static void contexts_wait_for_no_circle(int kept, int each, int n_reading, Meanwhile meanwhile) {
    House house(4, 0.5); // 32 experts
    house.pass(3, range(0, kept));
    house.table.set_layer_limits(house.map.layers[3].il, kept, House::N_EXPERT);
    house.pass(0, range(0, each));
    std::vector<ReadRequest> reading;
    WatchedReader reader(house.table.loader());
    for (auto [layer, n] : { std::pair(1, each), std::pair(2, n_reading) }) {
        house.table.prefetch(house.map.layers[layer].il, ALL.data(), n);
    }
    for (ReadRequest request; house.table.loader().try_next(request);) {
        reading.push_back(request);
    }
    CHECK(house.stats().used_bytes == house.stats().budget_bytes);
    std::atomic<int> n_done { 0 };
    auto run = [&](int layer) {
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
        house.table.set_layer_limits(house.map.layers[1].il, 4, House::N_EXPERT);
        house.table.set_layer_limits(house.map.layers[3].il, 4, House::N_EXPERT);
    });
}

// What is counted, is counted once, however often a context has to wait.
static void a_layer_that_waits_is_counted_once() {
    House house(4, 0); // the experts of one layer
    WatchedReader reader(house.table.loader());
    Owner other = { &other };
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

// reading ahead

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
    House house(3, 0.7);
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

// usage

static void experts_that_the_router_asks_for_count_as_used_whatever_took_their_place() {
    for (bool substituted : { false, true }) {
        House house(2, 0.5);
        house.pass(0, range(0, 16)); // the budget is full
        house.pass(0, range(2, 16));
        // 0 is asked for again and again; 1 was used as long ago. If 2 stands in for 0, it is computed with.
        for (int i = 0; i < 3; ++i) {
            house.pass(house.owner, 0, { 2 }, { substituted ? 0 : 2 }, 1);
        }
        house.pass(1, { 0 });
        house.pass(1, { 1 });
        CHECK(!house.resident(0, 1) && house.resident(0, 0) == substituted);
    }
}

static void nobody_waits_for_reads_that_nobody_makes() {
    const ModelMap map = synthetic_map(path, 2, House::N_EXPERT, [](int) { return SMALL; });
    Table table(map, std::make_unique<HostBank>(map, map.slots_bytes()), call_source(touch_pages, nullptr), plain_codec, {});
    table.prefetch(map.layers[0].il, ALL.data(), (int) ALL.size());
    table.wait_idle();
    pyorch_stats stats;
    table.get_stats(-1, stats);
    CHECK(stats.loads == 0);
}

// the decode stage

class Damaged : public Codec {
public:
    const char * decode(const ExpertTensor & tensor, char *, char * read) const override {
        return tensor.role == "down" ? nullptr : read;
    }
};

static void an_expert_that_does_not_decode_fails_its_layer_with_a_sentence() {
    static const Damaged damaged;
    House house(2, 1, PYORCH_LRU, [](int) { return SMALL; }, [](Form) -> const Codec & { return damaged; });
    house.table.acquire(house.owner, 0, { ALL, ALL, 1 });
    house.reader.read_all();
    const char * zeros = house.table.address(house.owner, 0, 3, 2, true);
    CHECK(zeros && zeros[0] == 0 && house.table.address(house.owner, 0, 3, 0, true) != zeros);
    CHECK(!house.table.release(house.owner));
    CHECK(house.table.last_error().find("ffn_down_exps") != std::string::npos);
    CHECK(house.table.last_error().find("damaged") != std::string::npos);
    CHECK(house.stats().resident_experts == 0 && house.stats().failures == 1);
}

// streams

// Layers of which a budget of 5 experts at least must do.
struct Narrow : House {
    explicit Narrow(double share, Codecs codecs = plain_codec) :
        House(3, share, PYORCH_LRU, [](int) { return SMALL; }, std::move(codecs), 2) {}

    uint64_t expert_bytes() const { return map.layers[0].expert_bytes(); }

    // As mul_mat_id with so many compute threads, one of which is ahead of the others as far as may be. Returns how far
    // that was.
    int compute(int layer, const std::vector<int> & experts, int n_threads = 2, std::vector<int> roles = { 0, 1, 2 }) {
        const std::vector<char> threads(n_threads);
        auto address = [&](int thread, int expert, int role) {
            return table.address(owner, layer, expert, role, false, &threads[thread]);
        };
        owner.n_threads = n_threads;
        int most = 0;
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
    pyorch_stats of_layer;
    house.table.get_stats(house.map.layers[1].il, of_layer);
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
        CHECK(house.table.loader().idle() == (n_reading == 0)); // what no reader had begun is not read
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
    Narrow house(0, [](Form) -> const Codec & { return damaged; });
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
    house.table.set_layer_limits(house.map.layers[0].il, 6, House::N_EXPERT);
    CHECK(house.pass(0, range(4, 14)) && house.n_resident(0) >= 10);
}

static void what_fits_is_held_whole_and_pins_and_minima_leave_room_for_a_window() {
    Narrow house(0.25); // 12 experts
    CHECK(house.pass(0, range(0, 12)) && house.n_resident(0) == 12); // else it would wait to be asked for
    const int32_t pinned[] = { 0, 1, 2, 3 };
    house.table.pin(house.map.layers[1].il, pinned, 4);
    house.table.set_layer_limits(house.map.layers[2].il, 3, House::N_EXPERT);
    house.reader.read_all();
    bool refused = false;
    try {
        house.table.set_layer_limits(house.map.layers[2].il, 4, House::N_EXPERT);
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
    CHECK(argc == 2);
    path = argv[1];
    the_index_finds_what_a_search_of_all_finds();
    values_keep_the_order_of_faded_frequencies_at_any_time();
    what_was_used_longest_ago_goes_first();
    what_follows_what_is_learned_and_valued();
    what_does_not_follow_on_teaches_no_table();
    what_was_learned_goes_on_from_its_copy();
    a_table_has_learned_from_all_layers_before_one_comes();
    where_turns_count_the_layer_whose_turn_comes_last_gives();
    loads_of_several_sizes_take_no_fresh_pages_once_the_memory_is_shared_out();
    memory_is_fresh_for_who_writes_there_first();
    memory_follows_the_size_class_that_lacks_it();
    a_whole_layer_of_any_size_fits_into_the_smallest_budget();
    a_budget_can_shrink_and_grow();
    a_context_elsewhere_makes_no_guess_late();
    a_guess_for_a_layer_that_its_context_has_passed_is_ignored();
    a_guess_waits_for_the_pass_of_its_own_context();
    a_forecast_changes_what_goes_unless_it_comes_too_late();
    what_a_context_held_and_wanted_goes_with_it();
    a_lowered_budget_holds_once_the_running_layers_end();
    a_lowered_budget_holds_once_the_reads_end();
    contexts_wait_for_no_circle_beside_a_minimum();
    contexts_wait_for_no_circle_under_a_lowered_budget();
    contexts_wait_for_no_circle_while_pins_and_minima_are_raised();
    a_layer_that_waits_is_counted_once();
    a_pin_of_what_is_read_on_a_guess_survives_the_pass();
    a_pin_takes_memory_from_what_was_read_ahead();
    what_a_prompt_wanted_and_never_read_is_no_scan_afterwards();
    a_pin_that_waits_for_memory_survives_a_prompt();
    a_prompt_reads_the_next_layer_ahead_but_none_that_no_decode_executes();
    nobody_waits_for_reads_that_nobody_makes();
    a_late_hit_is_a_hit_and_no_waste();
    a_guess_takes_nothing_that_the_last_token_used();
    experts_that_the_router_asks_for_count_as_used_whatever_took_their_place();
    an_expert_that_does_not_decode_fails_its_layer_with_a_sentence();
    a_layer_that_does_not_fit_is_streamed_and_each_matrix_read_once();
    what_a_streamed_layer_finds_in_memory_is_not_read_again();
    a_graph_that_takes_the_matrices_in_another_order_is_streamed_too();
    a_stream_that_is_aborted_gives_its_window_back();
    a_read_error_ends_a_stream_with_its_sentence();
    a_layer_gives_up_its_own_for_its_own_below_its_minimum();
    what_fits_is_held_whole_and_pins_and_minima_leave_room_for_a_window();
    return 0;
}
