// Who of the experts of a compressed pack belongs to which pool, and what pools give away.
//
//     pools_test FILE.gguf
//
// FILE.gguf and its pack are written, used and left.

#include "residency/compressed_house.h"

#include <functional>

using namespace pyorch;

// Uses that differ by more than one and a fifth, all at the same time.
static void use_all(Pools & pools) {
    for (int rank = 1; rank <= N_LAYERS * N_EXPERT; ++rank) {
        for (int i = 0; i < 10 * std::pow(1.4, N_LAYERS * N_EXPERT - rank); ++i) {
            pools.used(rank % N_LAYERS, (rank - 1) / N_LAYERS, 1);
        }
    }
}

static int count(const Pools & pools, Form form) {
    int n = 0;
    for (int layer = 0; layer < N_LAYERS; ++layer) {
        for (int id = 0; id < N_EXPERT; ++id) {
            n += pools.form_of(layer, id) == form;
        }
    }
    return n;
}

static void pools_have_the_ranks_below_their_thresholds() {
    const ModelMap map    = compressed_map();
    const uint64_t slot   = map.layers[0].slot_bytes();
    const uint64_t fewest = map.floor_bytes() - ModelMap::MIN_STAGED * map.parts_bytes();
    const auto     n_full = (double) fewest / (double) slot;
    double         stored = 0;
    for (const MoeLayer & layer : map.layers) {
        stored += (double) (slot_bytes(layer, PART_E) + slot_bytes(layer, PART_SM)) / N_LAYERS;
    }
    Pools pools(map);
    use_all(pools);
    for (int more = 1; more < 16; ++more) {
        pools.divide(map.floor_bytes() + more * slot / 2, fewest, { 0, 0, 0.9, 0, 0.1 });
        const double n_stored = (double) pools.limit(Form::COMPRESSED) / stored;
        CHECK(count(pools, Form::FULL) == std::ceil(n_full) - 1);
        CHECK(count(pools, Form::FULL) + count(pools, Form::COMPRESSED) == std::ceil(n_full + 1.05 * n_stored) - 1);
        CHECK(count(pools, Form::E_ONLY) > 0 && count(pools, Form::ABSENT) == 0); // the last takes the rest
    }
    pools.divide(map.floor_bytes() + slot, fewest, ALL_FULL);
    CHECK(count(pools, Form::COMPRESSED) + count(pools, Form::SM_ONLY) + count(pools, Form::E_ONLY) == 0);
}

static void a_pool_of_a_form_without_bytes_has_nobody() {
    ModelMap map = compressed_map();
    for (MoeLayer & layer : map.layers) {
        auto pack               = std::make_shared<PackedLayer>(*layer.pack);
        pack->part_slot[PART_E] = 0;
        layer.pack              = pack;
    }
    Pools pools(map);
    use_all(pools);
    const uint64_t fewest = map.floor_bytes() - ModelMap::MIN_STAGED * map.parts_bytes();
    pools.divide(map.floor_bytes() + 4 * map.layers[0].slot_bytes(), fewest, { 0, 0, 0.5, 0, 0.5 });
    CHECK(pools.limit(Form::E_ONLY) > 0 && count(pools, Form::COMPRESSED) > 0);
    CHECK(count(pools, Form::E_ONLY) == 0 && count(pools, Form::ABSENT) == 0);
}

static void ranks_go_on_from_uses_that_are_known() {
    const ModelMap map = compressed_map();
    Pools          pools(map);
    for (int layer = 0; layer < N_LAYERS; ++layer) {
        double uses[N_EXPERT] = {};
        for (int id = 0; id < N_EXPERT; ++id) {
            uses[id] = std::pow(1.4, -N_LAYERS * id - layer); // 0 of layer 0 most often, then 0 of layer 1
        }
        pools.begin_with(layer, uses, 1000);
    }
    const uint64_t slot   = map.layers[0].slot_bytes();
    const uint64_t fewest = map.floor_bytes() - ModelMap::MIN_STAGED * map.parts_bytes();
    pools.divide(map.floor_bytes() + 4 * slot, fewest, { 0, 0, 0.5, 0.5, 0 });
    const int n_full = count(pools, Form::FULL), n_compressed = count(pools, Form::COMPRESSED);
    CHECK(n_full > 0 && n_compressed > 0 && n_full + n_compressed < N_LAYERS * N_EXPERT);
    for (int rank = 0; rank < N_LAYERS * N_EXPERT; ++rank) {
        CHECK(pools.form_of(rank % N_LAYERS, rank / N_LAYERS) ==
            (rank < n_full                       ? Form::FULL :
                    rank < n_full + n_compressed ? Form::COMPRESSED :
                                                   Form::SM_ONLY));
    }
    // Those that come count as much as if all of them had been seen.
    for (int i = 0; i < 3; ++i) {
        pools.used(1, N_EXPERT - 1, 1000);
    }
    CHECK(pools.form_of(1, N_EXPERT - 1) == Form::FULL);
}

static void an_expert_whose_uses_are_known_has_its_pool_from_its_first_use_on() {
    const ModelMap map = compressed_map();
    for (const bool known : { false, true }) {
        House house(map, 12, { 0, 0.5, 0.5, 0, 0 });
        for (int layer = 0; known && layer < N_LAYERS; ++layer) {
            double uses[N_EXPERT];
            for (int id = 0; id < N_EXPERT; ++id) {
                uses[id] = std::pow(1.4, N_EXPERT - id);
            }
            house.table.set_uses(map.layers[layer].il, uses, N_EXPERT);
        }
        CHECK(house.use(0, { 0, 7 }));
        const uint64_t each = slot_bytes(map.layers[0], PART_E) + slot_bytes(map.layers[0], PART_SM);
        CHECK(house.stats().stored_bytes == (known ? each : 0)); // of 7
    }
}

static void what_is_used_just_now_stays_in_the_last_pool_whatever_its_rank() {
    const ModelMap map  = compressed_map();
    const uint64_t each = slot_bytes(map.layers[0], PART_E) + slot_bytes(map.layers[0], PART_SM);
    House          house(map, 14, { 0, 0.7, 0.3, 0, 0 });
    for (const MoeLayer & layer : map.layers) {
        double uses[N_EXPERT] = {};
        for (int id = 0; id < 8; ++id) {
            uses[id] = std::pow(1.4, 10 - id);
        }
        house.table.set_uses(layer.il, uses, N_EXPERT);
    }
    CHECK(house.use(0, { 9 }) && house.stats().stored_bytes == each);
    for (int layer = 0; layer < N_LAYERS; ++layer) {
        for (int id = 0; id < 3; ++id) {
            CHECK(house.use(layer, { id }) && house.stats().stored_bytes == each); // of the first ranks
        }
    }
}

static void a_guess_takes_the_memory_of_what_is_kept_compressed_too_before_that_of_whole_experts() {
    const ModelMap map = compressed_map();
    House          house(map, 6, { 0, 0.64, 0.36, 0, 0 }); // seven full ones
    for (int layer = 0; layer < N_LAYERS; ++layer) {
        double uses[N_EXPERT];
        std::fill(uses, uses + N_EXPERT, 1.0);
        std::fill(uses, uses + 2, layer == 0 ? 1000.0 : 1.0); // these two are for the whole
        house.table.set_uses(map.layers[layer].il, uses, N_EXPERT);
    }
    CHECK(house.use(0, { 0, 1 }));
    CHECK(house.use(0, { 5, 6 }));
    CHECK(house.use(1, { 4 }));
    CHECK(house.use(1, { 5, 6 })); // all are in use or were just used, but for 0 and 1; the others are kept compressed
    std::vector<Table::Want> wants = { { 7, 0.9, true, false } };
    house.table.want(house.owner.context, 0, 1, wants);
    house.reader.read_all();
    std::vector<uint8_t> resident;
    house.table.resident(0, resident);
    CHECK(wants[0].absent && resident[7] && resident[0] && resident[1]);
}

// What a full expert gives up for its rank has to be read again when the rank is gone: that happens neither to experts
// that pass through what a layer needs, nor to those that are used about as often as each other.
static void what_fits_compressed_is_never_absent() {
    const ModelMap map  = compressed_map();
    const uint64_t each = slot_bytes(map.layers[0], PART_E) + slot_bytes(map.layers[0], PART_SM);
    for (const double full : { 0.0, 0.2, 0.35, 0.45 }) {
        House     house(map, 14, { 0, full, 1 - full, 0, 0 });
        const int n_used = (int) ((1 - full) * 16 * (double) map.layers[0].slot_bytes() / (double) each) / N_LAYERS;
        CHECK(n_used > 3);
        std::mt19937 rng(1);
        uint64_t     misses = 0, compressed_hits = 0;
        for (int token = 0; token < 500; ++token) {
            for (int layer = 0; layer < N_LAYERS; ++layer) {
                const int one = (int) (rng() % n_used), other = (int) ((one + 1 + rng() % (n_used - 1)) % n_used);
                CHECK(house.use(layer, { std::min(one, other), std::max(one, other) }));
            }
            if (token == 100) {
                misses          = house.stats().misses;
                compressed_hits = house.stats().compressed_hits;
            }
        }
        CHECK(full > 0 || house.stats().misses > misses);
        CHECK(house.stats().misses - misses == house.stats().compressed_hits - compressed_hits);
    }
}

static bool refused(const std::function<void()> & call) {
    try {
        call();
    } catch (const Failure &) {
        return true;
    }
    return false;
}

static void uses_that_cannot_be_are_refused() {
    const ModelMap map = compressed_map();
    House          house(map, 6, ALL_FULL);
    for (const double wrong : { -1.0, (double) NAN, (double) INFINITY }) {
        double uses[N_EXPERT] = { 1, wrong };
        CHECK(refused([&] { house.table.set_uses(map.layers[0].il, uses, N_EXPERT); }));
    }
    const double uses[N_EXPERT] = {};
    CHECK(refused([&] { house.table.set_uses(map.layers[0].il, uses, N_EXPERT - 1); }));
    CHECK(refused([&] { house.table.set_uses(99, uses, N_EXPERT); }));
    house.table.set_uses(map.layers[0].il, uses, N_EXPERT);
}

static void what_is_reserved_takes_memory_from_pools() {
    const ModelMap         map  = compressed_map();
    const std::vector<int> some = experts(8);
    const int              il   = map.layers[0].il;
    House                  house(map, 8, { 0, 0, 1, 0, 0 });
    for (int round = 0; round < 40; ++round) {
        CHECK(house.use(1, { round % N_EXPERT }));
    }
    const uint64_t stored = house.stats().stored_bytes;
    CHECK(stored > 0);
    house.table.pin(il, some.data(), (int) some.size());
    house.reader.read_all();
    uint8_t mask[N_EXPERT];
    house.table.get_residency(il, mask, N_EXPERT);
    CHECK(std::all_of(mask, mask + some.size(), [](uint8_t state) { return state & PYORCH_RESIDENT; }));
    const uint64_t left = house.stats().stored_bytes;
    CHECK(left < stored);
    CHECK(house.use(1, experts(N_EXPERT), 64));
    const std::vector<int> all = experts(N_EXPERT);
    CHECK(refused([&] { house.table.pin(map.layers[1].il, all.data(), N_EXPERT); }));
    house.table.unpin(il, some.data(), (int) some.size());
    for (int round = 0; round < 40; ++round) {
        CHECK(house.use(1, { round % N_EXPERT }));
    }
    const uint64_t again = house.stats().stored_bytes;
    CHECK(again > left);
    house.table.set_limits(0, 8, N_EXPERT);
    CHECK(house.stats().stored_bytes < again);
    CHECK(house.use(0, experts(N_EXPERT), 64));
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            what_fits_compressed_is_never_absent,
            pools_have_the_ranks_below_their_thresholds,
            a_pool_of_a_form_without_bytes_has_nobody,
            ranks_go_on_from_uses_that_are_known,
            an_expert_whose_uses_are_known_has_its_pool_from_its_first_use_on,
            what_is_used_just_now_stays_in_the_last_pool_whatever_its_rank,
            a_guess_takes_the_memory_of_what_is_kept_compressed_too_before_that_of_whole_experts,
            uses_that_cannot_be_are_refused,
            what_is_reserved_takes_memory_from_pools,
        });
}
