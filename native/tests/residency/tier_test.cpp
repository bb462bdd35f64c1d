// A new memory of experts costs one class: Shelf, which the C API asks as it asks host memory and devices.

#include "check.h"
#include "engine.h"
#include "synthetic.h"

#include <numeric>

using namespace pyorch;

namespace {

constexpr int N_LAYERS = 3, N_EXPERT = 8;

// A number of places, for experts of any layer. An expert that is used is there at once.
class Shelf : public Tier {
public:
    explicit Shelf(int n_places) :
            seats(std::vector<int>(N_LAYERS, N_EXPERT), Values::MUST_TAKE, policy_list(), PYORCH_LRU,
                [this](Victims & victims, int layer, int id) {
                    const bool may_go = experts[layer][id].may_go();
                    victims.set(layer, id, FOR_DEMAND, may_go ? seats.values.value(layer, id) : Victims::NEVER);
                }),
            experts(N_LAYERS, std::vector<Seat>(N_EXPERT)), all(N_LAYERS), n_free(n_places) {
        std::iota(all.begin(), all.end(), 0);
        for (int layer : all) {
            for (int id = 0; id < N_EXPERT; ++id) {
                experts[layer][id].layer = layer;
                experts[layer][id].id    = id;
            }
        }
    }

    void use(int layer, int id) {
        Seat & seat = experts[layer][id];
        seats.values.passes(layer);
        seats.values.used(layer, id);
        ++(seat.resident() ? seats.counts(layer).hits : seats.counts(layer).misses);
        const bool full = seats.order.is_full(layer);
        if (seat.absent() && (full || n_free == 0)) {
            evict(seats.order.first_of(full ? std::vector<int>{ layer } : all, layer, FOR_DEMAND));
        }
        if (seat.absent() && n_free > 0) {
            --n_free;
            seats.come(seat);
            seats.arrive(seat);
        }
    }

    void hold(int layer, int id) { seats.hold(experts[layer][id]); }

    void mark(int layer, std::vector<uint8_t> & mask) override { seats.mark(layer, mask); }
    void set_policy(pyorch_policy policy) override { seats.values.set_policy(policy); }
    void add_stats(int layer, pyorch_stats & stats) override {
        for (int of : all) {
            if (layer < 0 || layer == of) {
                add_counts(stats, seats.counts(of));
                stats.resident_experts += seats.n_resident(of);
            }
        }
    }
    void reset_stats() override { seats.reset_counts(); }
    void set_limits(int layer, int min, int max) override {
        seats.values.set_limits(layer, min, max);
        while (seats.order.n(layer) > max) {
            evict(seats.order.first_of({ layer }, layer, FOR_DEMAND));
        }
    }

private:
    Seats                          seats;
    std::vector<std::vector<Seat>> experts;
    std::vector<int>               all;
    int                            n_free;

    void evict(const Victim & victim) {
        if (victim) {
            ++seats.counts(victim.layer).evictions;
            ++n_free;
            seats.go(experts[victim.layer][victim.expert]);
        }
    }
};

std::vector<int> residents(Tier & tier, int layer) {
    std::vector<uint8_t> mask(N_EXPERT);
    std::vector<int>     experts;
    tier.mark(layer, mask);
    for (int id = 0; id < N_EXPERT; ++id) {
        if (mask[id]) {
            experts.push_back(id);
        }
    }
    return experts;
}

using Experts = std::vector<int>;

void seats_evict_by_policy_and_keep_limits_and_holds() {
    Shelf shelf(4);
    for (int id : { 0, 1, 0, 0, 2, 3 }) {
        shelf.use(0, id);
    }
    shelf.use(1, 5); // in place of the least recently used
    CHECK(residents(shelf, 0) == Experts({ 0, 2, 3 }) && residents(shelf, 1) == Experts({ 5 }));
    shelf.hold(0, 0);
    shelf.use(1, 6);
    CHECK(residents(shelf, 0) == Experts({ 0, 3 }) && residents(shelf, 1) == Experts({ 5, 6 }));
    shelf.set_limits(1, 0, 1);
    CHECK(residents(shelf, 1) == Experts({ 6 }));
    shelf.set_limits(0, 2, N_EXPERT);
    shelf.use(2, 7);
    shelf.use(2, 6); // layer 0 keeps its minimum, though its experts were used before all others
    CHECK(residents(shelf, 0) == Experts({ 0, 3 }) && residents(shelf, 1).empty() &&
        residents(shelf, 2) == Experts({ 6, 7 }));
}

void the_api_asks_every_tier() {
    const ModelMap map    = synthetic_map(path, N_LAYERS, N_EXPERT, [](int) { return 64; });
    pyorch_config  config = pyorch_default_config;
    config.budget_bytes   = map.slots_bytes();
    config.read           = touch_pages;
    pyorch_engine engine(map, config, true);
    Shelf         shelf(2);
    engine.tiers.push_back(&shelf);
    for (int id : { 0, 0, 0, 1, 2 }) {
        shelf.use(1, id);
    }
    CHECK(residents(shelf, 1) == Experts({ 1, 2 }));
    pyorch_stats stats;
    CHECK(pyorch_get_stats(&engine, map.layers[1].il, &stats) == PYORCH_OK);
    CHECK(stats.hits == 2 && stats.misses == 3 && stats.evictions == 1 && stats.resident_experts == 2);
    CHECK(pyorch_get_stats(&engine, map.layers[0].il, &stats) == PYORCH_OK && stats.misses == 0);
    CHECK(pyorch_get_stats(&engine, -1, &stats) == PYORCH_OK && stats.misses == 3);
    CHECK(stats.budget_bytes == map.slots_bytes()); // of host memory
    pyorch_snapshot snapshot = {};
    CHECK(pyorch_get_snapshot(&engine, &snapshot) == PYORCH_OK && snapshot.stats.misses == 3);
    CHECK(pyorch_set_policy(&engine, PYORCH_LFU) == PYORCH_OK);
    shelf.use(1, 2);
    shelf.use(1, 2);
    shelf.use(1, 0); // was used more often than expert 1
    CHECK(residents(shelf, 1) == Experts({ 0, 2 }));
    CHECK(pyorch_reset_stats(&engine) == PYORCH_OK && pyorch_get_stats(&engine, -1, &stats) == PYORCH_OK);
    CHECK(stats.misses == 0 && stats.resident_experts == 2);
}

} // namespace

int main(int argc, char ** argv) {
    return run(argc, argv, { seats_evict_by_policy_and_keep_limits_and_holds, the_api_asks_every_tier });
}
