// What the residency table lets go first:
//
//     eviction_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "residency/house.h"

#include <cmath>
#include <random>
#include <set>

using namespace pyorch;

static void the_index_finds_what_a_search_of_all_finds() {
    std::mt19937                     rng(1);
    const std::vector<int>           n_experts = { 5, 64, 3, 17 };
    Victims                          victims(n_experts);
    std::vector<std::vector<double>> keys;
    for (int n : n_experts) {
        keys.emplace_back(n, Victims::NEVER);
    }
    for (int step = 0; step < 20000; ++step) {
        const int    layer = (int) (rng() % n_experts.size());
        const int    id    = (int) (rng() % n_experts[layer]);
        const double key   = rng() % 4 == 0 ? Victims::NEVER :
            rng() % 7 == 0                  ? Victims::SCANNED :
                                              (double) (rng() % 1000);
        victims.set(layer, id, FOR_GUESS, key);
        keys[layer][id]  = key;
        const int  asked = (int) (rng() % n_experts.size());
        const auto least = victims.least(asked, FOR_GUESS);
        const auto found = std::min_element(keys[asked].begin(), keys[asked].end());
        CHECK(least.key == *found);
        CHECK(least.expert < 0 ? *found == Victims::NEVER : keys[asked][least.expert] == *found);
        CHECK(victims.least(asked, FOR_DEMAND).expert < 0);
    }
}

static void values_keep_the_order_of_faded_frequencies_at_any_time() {
    const auto   policy    = find_policy(policy_list(), PYORCH_LFU).make(4);
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
        faded[i]       = { faded[i].frequency * std::exp2(-(double) (now - faded[i].at) / half_life) + 1, now };
        const size_t a = rng() % 30, b = rng() % 30;
        const double fa = faded[a].frequency * std::exp2(-(double) (now - faded[a].at) / half_life);
        const double fb = faded[b].frequency * std::exp2(-(double) (now - faded[b].at) / half_life);
        if (std::abs(fa - fb) > 1e-9) {
            CHECK((fa < fb) == (policy->value(usage[a], 0) < policy->value(usage[b], 0)));
        }
    }
}

// FineMoE, section 4.5: experts go in the order of 1 / (p * freq), the highest first.
static void finemoe_keeps_the_order_of_frequency_times_probability() {
    const auto            policy    = find_policy(policy_list(), PYORCH_FINEMOE).make(3);
    const double          half_life = 32.0 * 3;
    std::mt19937          rng(3);
    std::vector<Usage>    usage(20);
    std::vector<uint64_t> uses[20]; // when each was used
    std::vector<double>   freq(20);
    const auto            random = [&] { return 0.001 + 0.999 * (double) rng() / (double) rng.max(); };
    for (uint64_t now = 1; now < 500; ++now) {
        const size_t i = std::min(rng() % 20, rng() % 20);
        policy->used(usage[i], now);
        uses[i].push_back(now);
        for (size_t e = 0; e < freq.size(); ++e) {
            freq[e] = 0;
            for (uint64_t at : uses[e]) {
                freq[e] += std::exp2(-(double) (now - at) / half_life);
            }
        }
        const size_t a = rng() % 20, b = rng() % 20;
        const double pa = random(), pb = random();
        if (freq[a] > 0 && freq[b] > 0 && std::abs(pa * freq[a] - pb * freq[b]) > 1e-6) {
            const bool a_goes_first = 1 / (pa * freq[a]) > 1 / (pb * freq[b]);
            CHECK(a_goes_first == (policy->value(usage[a], (float) pa) < policy->value(usage[b], (float) pb)));
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

static void what_came_first_goes_first_however_often_it_was_used() {
    House house(4, 0.5, PYORCH_FIFO); // 32 experts
    for (int token = 0; token < 8; ++token) {
        for (int layer = 0; layer < 4; ++layer) {
            house.pass(layer, token == 0 ? std::vector<int>{ 0 } : std::vector<int>{ 0, token });
        }
    }
    CHECK(house.stats().evictions == 0 && house.stats().resident_experts == 32);
    for (int layer = 0; layer < 4; ++layer) {
        house.pass(layer, { 8 });
        CHECK(!house.resident(layer, 0) && house.resident(layer, 1) && house.resident(layer, 8));
    }
}

// The algorithm as its authors write it, beside the table.
static void marking_takes_at_random_what_was_not_used_in_its_phase() {
    House house(4, 0.5, PYORCH_MARKING);
    using Id = std::pair<int, int>; // layer, expert
    std::set<Id>    resident_ids, marked;
    std::vector<Id> uses; // the last one last
    std::mt19937    rng(3);
    int             n_oldest = 0, n_evictions = 0;
    for (int step = 0; step < 4000; ++step) {
        const Id id = { step % 4, (int) std::min(rng() % 16, rng() % 16) };
        house.pass(id.first, { id.second });
        if (resident_ids.insert(id).second && resident_ids.size() > 32) {
            if (marked.size() == 32) {
                marked.clear();
            }
            const auto gone = [&](const Id & other) { return !house.resident(other.first, other.second); };
            CHECK(std::count_if(resident_ids.begin(), resident_ids.end(), gone) == 1);
            const Id victim = *std::find_if(resident_ids.begin(), resident_ids.end(), gone);
            CHECK(marked.count(victim) == 0);
            resident_ids.erase(victim);
            const auto oldest = std::find_if(uses.begin(), uses.end(),
                [&](const Id & use) { return (resident_ids.count(use) || use == victim) && !marked.count(use); });
            n_oldest += *oldest == victim;
            ++n_evictions;
        }
        marked.insert(id);
        uses.erase(std::remove(uses.begin(), uses.end(), id), uses.end());
        uses.push_back(id);
    }
    CHECK(n_evictions > 500 && n_oldest < n_evictions / 2);
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

static void what_a_tier_above_has_goes_first_and_not_before_it_must() {
    House house(2, 0.5);
    house.pass(0, range(0, 15));
    std::vector<uint8_t> above(House::N_EXPERT);
    above[14] = 1; // used last, with all others
    house.table.set_above(0, above);
    house.pass(0, range(0, 15));
    house.pass(1, { 0 });
    CHECK(house.n_resident(0) == 15); // there was room
    house.pass(1, { 1 });
    CHECK(!house.resident(0, 14) && house.n_resident(0) == 14);
    house.pass(0, range(0, 15));
    house.table.set_above(0, std::vector<uint8_t>(House::N_EXPERT)); // it is worth what it was again
    house.pass(1, { 2 });
    CHECK(house.resident(0, 14));
}

static void both_tiers_together_may_have_nearly_all() {
    House                house(2, 0.5); // of 32 experts
    std::vector<uint8_t> above(House::N_EXPERT, 1);
    house.table.set_above(0, above);
    CHECK(!house.table.has_nearly_all()); // there is room, and none of layer 1 is there
    house.pass(1, range(0, 14));
    CHECK(house.table.has_nearly_all()); // two are lacking
    above[0] = 0;
    house.table.set_above(0, above);
    CHECK(!house.table.has_nearly_all()); // nor is there room for all
    house.pass(0, { 0 });
    above[0] = 1;
    house.table.set_above(0, above); // one that both have
    CHECK(house.table.has_nearly_all());
    house.pass(1, { 14, 15 }); // in whose place they came
    CHECK(house.table.has_nearly_all() && !house.resident(0, 0));
    above[1] = 0;
    house.table.set_above(0, above);
    house.pass(0, { 1 });
    CHECK(!house.table.has_nearly_all());
    house.table.set_above(0, std::vector<uint8_t>(House::N_EXPERT));
    CHECK(!house.table.has_nearly_all());
}

static void what_is_there_stays_unless_another_is_clearly_better() {
    const auto policy = [](pyorch_policy kind) { return find_policy(policy_list(), kind).make(1); };
    const auto lfu = policy(PYORCH_LFU), learned = policy(PYORCH_LEARNED), lru = policy(PYORCH_LRU);
    Usage      once, thrice;
    lfu->used(once, 1);
    for (int i = 0; i < 3; ++i) {
        lfu->used(thrice, 1);
    }
    CHECK(lfu->settled(lfu->value(once, 0)) < lfu->value(thrice, 0));
    lfu->used(once, 1);
    CHECK(lfu->settled(lfu->value(once, 0)) > lfu->value(thrice, 0));
    CHECK(learned->settled(0.2) > 0.4 && learned->settled(0.2) < 0.6 && lru->settled(7) == 7);
}

static void a_value_is_discounted_by_the_wait_for_its_layer() {
    Values values({ 8, 8, 8, 8 }, Values::MUST_TAKE, policy_list(), PYORCH_LEARNED);
    values.passes(1);
    CHECK(std::abs(values.worth(1, 0.5) - 0.5 * DISCOUNT) < 1e-12); // its turn was just now
    CHECK(std::abs(values.worth(3, 0.5) - 0.5 * std::sqrt(DISCOUNT)) < 1e-12);
    CHECK(values.worth(2, 0.5) > values.worth(3, 0.5) && values.worth(3, 0.5) > values.worth(0, 0.5));
}

static void a_policy_that_is_not_known_is_refused() {
    House house(2, 0.5);
    for (const auto policy : { PYORCH_FIFO, (pyorch_policy) 99 }) {
        bool refused = false;
        try {
            find_policy(policy_list(), policy);
        } catch (const Failure & failure) {
            refused = failure.status == PYORCH_INVALID;
        }
        CHECK(refused);
    }
    bool refused = false;
    try {
        house.table.set_policy((pyorch_policy) 99);
    } catch (const Failure & failure) {
        refused = failure.status == PYORCH_INVALID;
    }
    CHECK(refused);
    house.table.set_policy(PYORCH_FIFO); // this table is a replay's
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            the_index_finds_what_a_search_of_all_finds,
            values_keep_the_order_of_faded_frequencies_at_any_time,
            finemoe_keeps_the_order_of_frequency_times_probability,
            what_was_used_longest_ago_goes_first,
            what_came_first_goes_first_however_often_it_was_used,
            marking_takes_at_random_what_was_not_used_in_its_phase,
            a_forecast_changes_what_goes_unless_it_comes_too_late,
            experts_that_the_router_asks_for_count_as_used_whatever_took_their_place,
            what_a_tier_above_has_goes_first_and_not_before_it_must,
            what_is_there_stays_unless_another_is_clearly_better,
            a_value_is_discounted_by_the_wait_for_its_layer,
            a_policy_that_is_not_known_is_refused,
        });
}
