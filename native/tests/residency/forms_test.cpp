// Experts of a compressed pack in every form, one step at a time: what is read for them, what they hold, what stays.
//
//     forms_test FILE.gguf
//
// FILE.gguf, FILE.gguf.wide, FILE.gguf.large and their packs are written, used and left.

#include "residency/compressed_house.h"

#include <cmath>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

using namespace pyorch;

static constexpr PoolShares MIXES[] = {
    ALL_FULL,
    { 0, 0.5, 0.5, 0, 0 },
    { 0, 0.5, 0, 0.5, 0 },
    { 0, 0.5, 0, 0, 0.5 },
    { 0, 0.4, 0.2, 0.2, 0.2 },
};

static void experts_are_those_of_the_model_in_every_mix_of_forms() {
    const ModelMap map = compressed_map();
    for (int mix = 0; mix < 3 * (int) std::size(MIXES); ++mix) {
        const PoolShares & shares = MIXES[mix / 3];
        House              house(map, 6, shares, plain_codec(), (pyorch_recovery) (mix % 3));
        std::mt19937       rng(7);
        for (int pass = 0; pass < 40; ++pass) {
            for (int layer = 0; layer < N_LAYERS; ++layer) {
                const int a = (int) (rng() % 4), b = 4 + (int) (rng() % 6); // some are used more often than others
                CHECK(house.use(layer, { a, b }));
            }
        }
        const pyorch_stats stats = house.stats();
        CHECK(stats.decoded_bytes > 0 && stats.evictions > 0);
        CHECK((stats.compressed_hits > 0) == (shares[(int) Form::COMPRESSED] > 0));
        CHECK((stats.sm_hits > 0) == (shares[(int) Form::SM_ONLY] > 0));
        CHECK((stats.e_hits > 0) == (shares[(int) Form::E_ONLY] > 0));
    }
}

struct PartOfExpert {
    int  expert;
    Part part;

    bool operator==(const PartOfExpert & other) const { return expert == other.expert && part == other.part; }
};

// The stored parts of the experts of a layer, in the order in which the first request of each is read.
static std::vector<PartOfExpert> read_order(
    House & house, const std::vector<int> & experts, const std::vector<int> & rows) {
    house.acquire(0, experts, 4, rows);
    std::vector<PartOfExpert> order;
    for (ReadRequest request; house.table.loader().try_next(request);) {
        const PartOfExpert read{ request.load->expert, request.part };
        if (request.reads() && std::find(order.begin(), order.end(), read) == order.end()) {
            order.push_back(read);
        }
        const int64_t n = house.table.loader().bytes().read(request.file, request.offset, request.buf, request.size);
        house.table.loader().finish(request, n, 1);
    }
    CHECK(house.check(0, experts));
    return order;
}

static void with_affinity_the_expert_that_computes_most_rows_is_recovered_first() {
    const ModelMap map = compressed_map();
    for (const pyorch_recovery recovery : { PYORCH_RECOVERY_KERNELS, PYORCH_RECOVERY_AFFINITY }) {
        House house(map, 12, ALL_FULL, plain_codec(), recovery);
        for (const bool first : { true, false }) {
            const std::vector<int> asked = first ? std::vector<int>{ 1, 4, 5 } : std::vector<int>{ 2, 7 };
            const std::vector<int> rows  = first ? std::vector<int>{ 1, 2, 4 } : std::vector<int>{};
            std::vector<int>       order = asked;
            if (first && recovery == PYORCH_RECOVERY_AFFINITY) {
                std::reverse(order.begin(), order.end());
            }
            std::vector<PartOfExpert> expected;
            for (int expert : order) {
                expected.push_back({ expert, PART_E });
                expected.push_back({ expert, PART_SM });
            }
            CHECK(read_order(house, asked, rows) == expected);
        }
    }
}

// The reads of a block of algorithm 1 of ZipMoE, one at a time, for experts in the order of the block: all exponents,
// then all signs and mantissas. So many experts have memory at once; the next one gets it when one has been recovered.
static std::vector<PartOfExpert> reads_of_a_block(const std::vector<int> & block, size_t n_at_once) {
    std::vector<PartOfExpert> left, read;
    for (const Part part : { PART_E, PART_SM }) {
        for (int expert : block) {
            left.push_back({ expert, part });
        }
    }
    std::vector<int> waiting = block, with_memory;
    while (!left.empty()) {
        while (with_memory.size() < n_at_once && !waiting.empty()) {
            with_memory.push_back(waiting.front());
            waiting.erase(waiting.begin());
        }
        const auto next = std::find_if(left.begin(), left.end(), [&](const PartOfExpert & each) {
            return std::find(with_memory.begin(), with_memory.end(), each.expert) != with_memory.end();
        });
        read.push_back(*next);
        left.erase(next);
        if (read.back().part == PART_SM) { // its exponents were read before
            with_memory.erase(std::find(with_memory.begin(), with_memory.end(), read.back().expert));
        }
    }
    return read;
}

// No rate is known yet, so decoding takes no time, no block is compute-bound, and up to 16 matrices are one block.
static void the_order_of_the_paper_reads_all_exponents_of_a_block_first() {
    constexpr int    N_MATRICES = 3, MOST_IN_A_BLOCK = 16;
    constexpr size_t N_AT_ONCE = 3; // of a sixteenth of this budget
    const ModelMap   map       = compressed_map();
    std::mt19937     rng(13);
    for (int round = 0; round < 40; ++round) {
        House            house(map, 40, ALL_FULL, plain_codec(), PYORCH_RECOVERY_EXPONENTS_FIRST);
        std::vector<int> asked = experts(N_EXPERT), rows(2 + rng() % (MOST_IN_A_BLOCK / N_MATRICES - 1));
        std::shuffle(asked.begin(), asked.end(), rng);
        asked.resize(rows.size());
        std::sort(asked.begin(), asked.end());
        for (int & n : rows) {
            n = 1 + (int) (rng() % 3);
        }
        std::vector<int> block;
        for (int n : { 3, 2, 1 }) {
            for (size_t i = 0; i < asked.size(); ++i) {
                if (rows[i] == n) {
                    block.push_back(asked[i]);
                }
            }
        }
        CHECK(read_order(house, asked, rows) == reads_of_a_block(block, N_AT_ONCE));
    }
}

static PoolShares random_shares(std::mt19937 & rng) {
    double parts[4], sum = 0;
    for (double & part : parts) {
        part = rng() % 3 == 0 ? 0 : 1 + rng() % 100;
        sum += part;
    }
    return sum == 0 ? ALL_FULL : PoolShares{ 0, parts[0] / sum, parts[1] / sum, parts[2] / sum, parts[3] / sum };
}

// House::check() looks at the budget and at every byte.
static void any_mix_of_forms_stays_within_any_budget_while_both_change() {
    const ModelMap map = compressed_map();
    std::mt19937   rng(11);
    uint64_t       n_in_part = 0;
    for (int start = 0; start < 8; ++start) {
        House house(map, (int) (rng() % 16), random_shares(rng));
        for (int step = 0; step < 48; ++step) {
            if (step % 12 == 11) {
                n_in_part += house.in_part();
                house.table.set_budget(map.floor_bytes() + rng() % (16 * map.layers[0].slot_bytes()));
                house.table.set_pools(random_shares(rng));
                house.table.reset_stats(); // the most that was used counts from here
            }
            const bool prompt = rng() % 16 == 0;
            CHECK(house.use(step % N_LAYERS,
                prompt ? experts(N_EXPERT) : std::vector<int>{ (int) (rng() % 4), 4 + (int) (rng() % 6) },
                prompt ? 64 : 1));
        }
        n_in_part += house.in_part();
    }
    CHECK(n_in_part > 0);
}

static void what_is_compressed_in_memory_is_not_read_again() {
    const ModelMap map = compressed_map();
    House          house(map, 12, { 0, 0.3, 0.7, 0, 0 });
    // All were used once; a few are used so often that full ones are these.
    for (int round = 0; round < 30; ++round) {
        CHECK(house.use(0, { 0, 1 }));
        CHECK(house.use(1, { 0, 1 }));
        const int id = 2 + round % (N_EXPERT - 2);
        CHECK(house.use(0, { id }));
    }
    const uint64_t read = house.stats().bytes_read;
    const uint64_t hits = house.stats().compressed_hits;
    for (int id = 2; id < N_EXPERT; ++id) {
        CHECK(house.use(0, { id }));
    }
    const pyorch_stats stats = house.stats();
    CHECK(stats.compressed_hits > hits);
    CHECK(stats.bytes_read - read < (N_EXPERT - 2 - (stats.compressed_hits - hits) + 1) * map.layers[0].slot_bytes());
}

static void a_prompt_that_needs_more_than_there_is_memory_for_comes_through_it() {
    const ModelMap map = compressed_map();
    for (const PoolShares & shares : MIXES) {
        House house(map, 0, shares);
        for (int round = 0; round < 3; ++round) {
            CHECK(house.use(0, experts(N_EXPERT), 64));
            CHECK(house.use(1, { 1, 2 }));
        }
    }
}

static void loads_come_through_a_pool_that_shrinks_under_them() {
    const ModelMap map = compressed_map();
    House          house(map, 12, { 0, 0, 0, 0, 1 });
    for (int round = 0; round < 40; ++round) {
        CHECK(house.use(0, { round % N_EXPERT }));
    }
    CHECK(house.stats().stored_bytes > 0);
    const std::vector<int> some = { 0, 1, 2, 3, 4 };
    house.acquire(0, some);
    house.table.set_pools(ALL_FULL);
    CHECK(house.check(0, some));
    CHECK(house.stats().stored_bytes == 0);
}

static void damaged_chunks_are_read_from_the_model_and_do_not_stay() {
    for (const Part part : { PART_E, PART_SM }) {
        const ModelMap map = compressed_map();
        damage(map, 0, 3, part);
        House house(map, 12, { 0, 0, 1, 0, 0 });
        for (int round = 0; round < 20; ++round) {
            CHECK(house.use(0, { 3, 4 + round % 6 }));
        }
        CHECK(house.stats().failures == 0);
    }
}

static void damaged_layers_leave_no_memory_taken() {
    for (const Part part : { PART_E, PART_SM }) {
        const ModelMap map = compressed_map();
        for (int id = 0; id < N_EXPERT; ++id) {
            damage(map, 0, id, part);
        }
        for (const PoolShares & shares : MIXES) {
            House        house(map, 6, shares);
            std::mt19937 rng(7);
            for (int round = 0; round < 60;
                ++round) { // some are used more often than others, so that all pools have ranks
                for (int layer = 0; layer < N_LAYERS; ++layer) {
                    CHECK(house.use(layer, { (int) (rng() % 4), 4 + (int) (rng() % 6) }));
                }
            }
        }
    }
}

static void the_least_budget_is_enough_for_every_layer() {
    const std::string model = path + ".wide";
    for (const int n_used : { 16, 22 }) {
        write_model(model, 50, n_used, 100);
        ModelMap map(model);
        CHECK(compress(map, model + ".pack"));
        for (const PoolShares & shares : MIXES) {
            Pools          pools(map);
            const uint64_t fewest = map.floor_bytes() - ModelMap::MIN_STAGED * map.parts_bytes();
            pools.divide(map.floor_bytes(), fewest, shares);
            CHECK(pools.limit(Form::FULL) == fewest);
            House house(map, 0, shares);
            CHECK(house.use(0, experts(50), 64));
            CHECK(house.use(1, experts(n_used)));
        }
    }
}

static void pinned_experts_and_a_layer_fit_beside_each_other_in_the_least_budget() {
    const ModelMap         map    = compressed_map();
    const std::vector<int> pinned = experts(4);
    for (const PoolShares & shares : MIXES) {
        House house(map, 20, shares);
        house.table.pin(map.layers[0].il, pinned.data(), (int) pinned.size());
        house.reader.read_all();
        house.table.set_budget(map.floor_bytes() + pinned.size() * map.layers[0].slot_bytes());
        for (int layer = 0; layer < N_LAYERS; ++layer) {
            CHECK(house.use(layer, experts(N_EXPERT), 64));
        }
        house.table.set_pools({ 0, 0, 1, 0, 0 });
        CHECK(house.use(1, experts(N_EXPERT), 64));
    }
}

static void layers_that_are_streamed_count_no_hits_in_pools() {
    const ModelMap map = compressed_map();
    House          house(map, 6, { 0, 0.3, 0.7, 0, 0 });
    for (int round = 0; round < 30; ++round) {
        CHECK(house.use(0, { round % N_EXPERT }));
    }
    const pyorch_stats before = house.stats();
    CHECK(before.stored_bytes > 0);
    CHECK(house.use(0, experts(N_EXPERT), 64));
    CHECK(house.stats().compressed_hits == before.compressed_hits);
    CHECK(house.stats().bytes_read > before.bytes_read);
}

// More than the window of a layer, and no prompt.
static void several_sequences_are_computed_with_what_pools_hold() {
    const ModelMap         map = compressed_map();
    House                  house(map, 16, { 0, 0, 1, 0, 0 });
    const std::vector<int> some = { 0, 1, 2, 4, 5, 7, 8 };
    CHECK((int) some.size() > map.floor_experts(map.layers[0]));
    for (int round = 0; round < 3; ++round) {
        CHECK(house.use(0, some, 4));
        CHECK(house.use(1, some, 4)); // takes the memory of those of the other layer
    }
    const pyorch_stats before = house.stats();
    CHECK(house.use(0, some, 4));
    const pyorch_stats after = house.stats();
    CHECK(after.compressed_hits - before.compressed_hits == some.size() && after.bytes_read == before.bytes_read);
    const auto n_whole = [&] {
        int n = 0;
        for (int layer = 0; layer < N_LAYERS; ++layer) {
            std::vector<uint8_t> mask;
            house.table.resident(layer, mask);
            n += (int) std::count(mask.begin(), mask.end(), 1);
        }
        return n;
    };
    CHECK(n_whole() == (int) some.size());
    for (int round = 0; round < 300; ++round) {
        CHECK(house.use(round % N_LAYERS, { round / N_LAYERS % N_EXPERT, (round / N_LAYERS + 3) % N_EXPERT }));
    }
    CHECK(n_whole() == map.floor_experts(map.layers[0])); // the pools have their memory again
}

// Reads everything, and leaves what is to be decoded to whoever does it.
class Leaving : public LocalReader {
public:
    using LocalReader::LocalReader;

    void read_all() {
        for (ReadRequest request; loader.try_next(request);) {
            const int64_t n = loader.bytes().read(request.file, request.offset, request.buf, request.size);
            if (loader.read(request, request.reads() ? n : 0, 1)) {
                loader.decode_later(request);
            }
        }
    }
};

// A plan for one sequence has room for the experts of one: several at once are not streamed for that reason.
static void the_pool_of_full_experts_has_room_for_what_a_decode_computes_with_at_once() {
    House                  house(compressed_map(), 2, { 0, 0, 1, 0, 0 });
    const std::vector<int> wide = experts(house.table.map.floor_experts(house.table.map.layers[0]) + 1);
    CHECK(house.use(0, wide, 4));
    const uint64_t hits = house.stats().hits;
    CHECK(house.use(0, wide, 4));
    CHECK(house.stats().hits == hits + wide.size());
    // Nothing so wide comes again: memory is for compressed experts again.
    const uint64_t beside_wide = house.stats().stored_bytes;
    for (int i = 0; i < 300; ++i) {
        CHECK(house.use(i % N_LAYERS, { i / 2 % N_EXPERT }));
    }
    CHECK(house.stats().stored_bytes > beside_wide);
}

static bool is_from_model(const House & house, int layer, int expert, int role, const char * matrix) {
    const std::vector<char> expected = from_model(house.table.map, layer, expert, role);
    return matrix && memcmp(matrix, expected.data(), expected.size()) == 0;
}

static void who_waits_for_a_matrix_decodes() {
    const ModelMap         map = compressed_map();
    House                  house(map, 6, ALL_FULL);
    Leaving                reader(house.table.loader());
    const std::vector<int> some = { 2, 5 };
    house.acquire(0, some);
    reader.read_all();
    CHECK(!house.table.address(house.owner, 0, 2, 0, false));
    for (int role = 0; role < 3; ++role) {
        for (int id : some) {
            CHECK(is_from_model(house, 0, id, role, house.table.address(house.owner, 0, id, role, true)));
        }
    }
    CHECK(house.table.release(house.owner) && house.stats().failures == 0);
}

static void who_waits_for_all_that_was_ordered_decodes() {
    const ModelMap map = compressed_map();
    House          house(map, 60, ALL_FULL);
    Leaving        reader(house.table.loader());
    const int32_t  ahead[] = { 1 };
    house.table.prefetch(map.layers[1].il, ahead, 1);
    reader.read_all();
    house.table.wait_idle();
    std::vector<uint8_t> mask;
    house.table.resident(1, mask);
    CHECK(mask[1] && house.stats().decoded_bytes > 0);
}

static void a_matrix_is_there_before_exponents_of_the_others_are_read() {
    const std::string model = path + ".large";
    write_model(model, 2, 1, 8192);
    ModelMap map(model);
    CHECK(compress(map, model + ".pack"));
    CHECK(map.layers[0].pack->part_bytes[PART_E][1] < (1u << 20)); // which one request could read
    House    house(map, 0, ALL_FULL);
    Loader & loader = house.table.loader();
    house.acquire(0, { 1 });
    int  n_later  = 0;
    bool is_there = false;
    for (ReadRequest request; loader.try_next(request);) {
        n_later += is_there && request.part == PART_E;
        loader.finish(request, loader.bytes().read(request.file, request.offset, request.buf, request.size), 1);
        is_there = house.table.address(house.owner, 0, 1, 0, false) != nullptr;
    }
    CHECK(is_there && n_later == 2);
    CHECK(is_from_model(house, 0, 1, 2, house.table.address(house.owner, 0, 1, 2, false)));
    CHECK(house.table.release(house.owner));
}

static void what_is_needed_first_is_decoded_first() {
    const ModelMap map = compressed_map();
    House          house(map, 60, ALL_FULL); // three experts come at once
    Leaving        reader(house.table.loader());
    const int32_t  ahead[] = { 1 };
    house.table.prefetch(map.layers[1].il, ahead, 1);
    reader.read_all();
    const std::vector<int> some = { 2, 5 };
    house.acquire(0, some);
    reader.read_all();
    const auto is_there = [&](int role, int id) {
        return house.table.address(house.owner, 0, id, role, false) != nullptr;
    };
    for (int role = 0; role < 3; ++role) {
        while (!is_there(role, 2) || !is_there(role, 5)) {
            CHECK(role == 2 || (!is_there(role + 1, 2) && !is_there(role + 1, 5)));
            CHECK(house.table.loader().decode_next());
        }
    }
    std::vector<uint8_t> mask;
    house.table.resident(1, mask);
    CHECK(!mask[1]);
    house.table.loader().stop_decoding();
    while (house.table.loader().decode_next()) {
    }
    house.table.resident(1, mask);
    CHECK(mask[1] && house.table.release(house.owner));
}

static void what_was_read_ahead_and_is_needed_now_is_decoded_in_its_turn() {
    const ModelMap map = compressed_map();
    House          house(map, 60, ALL_FULL);
    Leaving        reader(house.table.loader());
    const int32_t  ahead[] = { 7 };
    house.table.prefetch(map.layers[0].il, ahead, 1);
    reader.read_all();
    const std::vector<int> some = { 2, 5, 7 };
    house.acquire(0, some);
    reader.read_all();
    const auto is_there = [&](int role, int id) {
        return house.table.address(house.owner, 0, id, role, false) != nullptr;
    };
    for (int role = 0; role < 3; ++role) {
        while (!std::all_of(some.begin(), some.end(), [&](int id) { return is_there(role, id); })) {
            CHECK(role == 2 || std::none_of(some.begin(), some.end(), [&](int id) { return is_there(role + 1, id); }));
            CHECK(house.table.loader().decode_next());
        }
    }
    CHECK(house.table.release(house.owner) && house.stats().failures == 0);
}

// Two steps of a matrix, each of which does not end before the other has begun.
class Meeting : public Codec {
public:
    const char * decode(const ExpertTensor &, char *, char * read) const override { return read; }

    bool recover(const MoeLayer & layer, int role, int expert, int step, const char * e, const char * sm,
        char * block) const override {
        if (role == 0 && step < 2) {
            std::unique_lock<std::mutex> lock(mutex);
            ++n_met;
            met.notify_all();
            met.wait(lock, [&] { return n_met >= 2; });
        }
        return Codec::recover(layer, role, expert, step, e, sm, block);
    }

private:
    mutable std::mutex              mutex;
    mutable std::condition_variable met;
    mutable int                     n_met = 0;
};

static void threads_that_wait_for_a_matrix_share_it() {
    static const Meeting meeting;
    const std::string    model = path + ".large";
    write_model(model, 4, 1, 2048);
    ModelMap map(model);
    CHECK(compress(map, model + ".pack"));
    House   house(map, 0, ALL_FULL, meeting);
    Leaving reader(house.table.loader());
    house.acquire(0, { 3 });
    reader.read_all();
    const char * others = nullptr;
    std::thread  other([&] { others = house.table.address(house.owner, 0, 3, 0, true); });
    const char * ours = house.table.address(house.owner, 0, 3, 0, true);
    other.join();
    CHECK(ours == others);
    const std::vector<char> expected = from_model(map, 0, 3, 0);
    CHECK(memcmp(ours, expected.data(), expected.size()) == 0);
    CHECK(house.table.address(house.owner, 0, 3, 2, true) && house.table.release(house.owner));
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            with_affinity_the_expert_that_computes_most_rows_is_recovered_first,
            the_order_of_the_paper_reads_all_exponents_of_a_block_first,
            experts_are_those_of_the_model_in_every_mix_of_forms,
            any_mix_of_forms_stays_within_any_budget_while_both_change,
            what_is_compressed_in_memory_is_not_read_again,
            a_prompt_that_needs_more_than_there_is_memory_for_comes_through_it,
            loads_come_through_a_pool_that_shrinks_under_them,
            damaged_chunks_are_read_from_the_model_and_do_not_stay,
            damaged_layers_leave_no_memory_taken,
            the_least_budget_is_enough_for_every_layer,
            pinned_experts_and_a_layer_fit_beside_each_other_in_the_least_budget,
            layers_that_are_streamed_count_no_hits_in_pools,
            the_pool_of_full_experts_has_room_for_what_a_decode_computes_with_at_once,
            several_sequences_are_computed_with_what_pools_hold,
            who_waits_for_a_matrix_decodes,
            who_waits_for_all_that_was_ordered_decodes,
            a_matrix_is_there_before_exponents_of_the_others_are_read,
            what_is_needed_first_is_decoded_first,
            what_was_read_ahead_and_is_needed_now_is_decoded_in_its_turn,
            threads_that_wait_for_a_matrix_share_it,
        });
}
