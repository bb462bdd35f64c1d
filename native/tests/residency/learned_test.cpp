// What the policy learned learns, and from what:
//
//     learned_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "residency/house.h"

#include <random>

using namespace pyorch;

static void what_follows_what_is_learned_and_valued() {
    constexpr int N = 24, N_USED = 2;
    LearnedValue  learned({ N, N }, N_USED);
    for (int token = 0; token < 600; ++token) { // a cycle of 12 pairs: all are used equally often, and equally long ago
        for (int layer = 0; layer < 2; ++layer) {
            const int first = 2 * ((token + layer) % 12);
            learned.visit({ &learned, layer, true, { first, first + 1 } });
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
    const int after = (next + 2) % N; // used a token later
    CHECK(std::abs(value[after] - DISCOUNT * value[next]) < 0.05);
}

static void what_does_not_follow_on_teaches_no_table() {
    LearnedValue learned({ 16, 16 }, 2);
    auto         visit = [&](const void * context, bool continues) {
        for (int layer = 0; layer < 2; ++layer) {
            learned.visit({ context, layer, continues, { 1, 5 } });
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
    auto         visit = [&](LearnedValue & learned, int layer, const std::vector<int> & experts) {
        learned.visit({ &learned, layer, true, experts });
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
    CHECK(a.moments == b.moments && a.previous == b.previous);
    CHECK(a.moments.size() == 100 * 2 && a.previous.size() == 100);
    for (int token = 0; token < 100; ++token) {
        CHECK(a.previous[(size_t) token] == token - 1);
        CHECK(__builtin_popcount((uint32_t) a.moments[(size_t) (2 * token)]) == 3);
    }
}

// Long after the tables and counts have forgotten it, a moment is recognized by what came before it.
static void what_followed_a_moment_that_was_alike_is_valued() {
    constexpr int N = 40, N_USED = 2, N_LAYERS = 4, LENGTH = 30;
    std::mt19937  rng(9);
    auto          random_text = [&] {
        std::vector<std::vector<int>> text(LENGTH * N_LAYERS);
        for (auto & used : text) {
            used = { (int) (rng() % (N / 2)), (int) (N / 2 + rng() % (N / 2)) };
        }
        return text;
    };
    Moments moments(N_LAYERS, N, N_USED);
    auto    pass = [&](const std::vector<std::vector<int>> & text, int n_tokens) {
        for (int i = 0; i < n_tokens * N_LAYERS; ++i) {
            moments.visit({ &moments, i % N_LAYERS, i >= N_LAYERS, text[(size_t) i] });
        }
    };
    const auto known = random_text();
    pass(known, LENGTH);
    for (int other = 0; other < 40; ++other) {
        pass(random_text(), LENGTH);
    }
    pass(known, 10);
    std::vector<float> votes((size_t) moments.n_words() * 32);
    CHECK(moments.votes(&moments, N_LAYERS - 1, votes.data()));
    for (int expert : known[10 * N_LAYERS + N_LAYERS - 1]) { // of the next token
        const auto more =
            std::count_if(votes.begin(), votes.end(), [&](float v) { return v > votes[(size_t) expert]; });
        CHECK(more <= 3);
    }
    std::vector<float> untouched(votes.size(), 7);
    CHECK(!moments.votes(&votes, 0, untouched.data()) && untouched[0] == 7);
}

// In a text that repeats itself, the vote for an expert is DISCOUNT^h if the h-th of the next tokens is the first one that
// uses it. A moment one period ago ends with the present token, so the last token of a period may lack a vote.
static void votes_are_discounted_by_the_first_use() {
    constexpr int N_LAYERS = 4, PERIOD = 10, N_PERIODS = 12;
    Moments       moments(N_LAYERS, 32, 2);
    // Expert 0 is used by every second token, and expert 1 + i by token i alone.
    auto experts = [](int token) { return std::vector<int>{ token % 2 ? 31 : 0, 1 + token % PERIOD }; };
    for (int token = 0; token < N_PERIODS * PERIOD; ++token) {
        for (int layer = 0; layer < N_LAYERS; ++layer) {
            moments.visit({ &moments, layer, token > 0, experts(token) });
        }
    }
    std::vector<float> votes(32);
    CHECK(moments.votes(&moments, N_LAYERS - 1, votes.data()));
    for (int h = 0; h < PERIOD - 1; ++h) {
        CHECK(std::abs(votes[(size_t) (1 + h)] - std::pow(DISCOUNT, h)) < 1e-3);
    }
    CHECK(std::abs(votes[0] - 1) < 1e-3 && std::abs(votes[31] - DISCOUNT) < 1e-3); // their later uses add nothing
    CHECK(votes[20] == 0);
}

// More tokens than there is room for, of two contexts that take turns.
static void the_oldest_moments_make_room() {
    constexpr int N_LAYERS = 40, N = 1024; // 5 KB a token
    Moments       moments(N_LAYERS, N, 2);
    int           a, b;
    std::mt19937  rng(10);
    CHECK(moments.capacity < 1000);
    for (int token = 0; token < 2 * moments.capacity + 3; ++token) {
        const void * context = rng() % 3 ? &a : &b;
        for (int layer = 0; layer < N_LAYERS; ++layer) {
            moments.visit({ context, layer, rng() % 20 != 0, { (int) (rng() % N) } });
        }
        std::vector<float> votes(N);
        moments.votes(context, N_LAYERS - 1, votes.data());
        CHECK(std::all_of(votes.begin(), votes.end(), [](float v) { return v >= 0 && v <= 1.001f; }));
        if (token % 97 == 0) {
            moments.forget(&b);
        }
    }
    std::vector<int32_t> masks, previous, masks2, previous2;
    moments.export_tokens(masks, previous);
    CHECK((int) previous.size() == moments.capacity && moments.size() == moments.capacity);
    Moments other(N_LAYERS, N, 2);
    other.import_tokens(masks, previous);
    other.export_tokens(masks2, previous2);
    CHECK(masks == masks2 && previous == previous2);
}

// A context that rests in the middle of a token goes on in a new one, once others took its place.
static void a_context_whose_place_was_taken_begins_anew() {
    constexpr int N_LAYERS = 40, N = 1024;
    Moments       moments(N_LAYERS, N, 2);
    int           a, b;
    moments.visit({ &b, 0, true, { 5 } });
    for (int token = 0; token < moments.capacity; ++token) {
        for (int layer = 0; layer < N_LAYERS; ++layer) {
            moments.visit({ &a, layer, true, { 7 } });
        }
    }
    moments.visit({ &b, 1, true, { 6 } });
    std::vector<int32_t> masks, previous;
    moments.export_tokens(masks, previous);
    CHECK(previous.back() == -1);
    const int words = moments.n_words();
    for (size_t mask = 0; mask < masks.size(); mask += (size_t) words) {
        const bool of_b = mask / (size_t) words / N_LAYERS == previous.size() - 1;
        CHECK(masks[mask] == (!of_b ? 1 << 7 : mask / (size_t) words % N_LAYERS == 1 ? 1 << 6 : 0));
    }
}

// No thread learns here: the layer that comes next does.
static void a_table_has_learned_from_all_layers_before_one_comes() {
    House house(2, 0.75, PYORCH_LEARNED); // where all fit none goes, and nothing is learned
    auto  count = [&](int expert) {
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

// A layer of a token that follows the last one, with all its reads.
static void decode(House & house, int layer, const std::vector<int> & experts) {
    house.table.acquire(house.owner, layer, { experts, experts, 1, true });
    house.reader.read_all();
    CHECK(house.table.release(house.owner));
}

static std::vector<double> values(House & house, int layer) {
    std::vector<double> of;
    house.table.with_learned([&](LearnedValue & learned) { of = learned.values(layer); });
    return of;
}

static void pins_minima_and_limits_hold_for_what_is_worth_least() {
    House         house(4, 0.5, PYORCH_LEARNED); // 32 experts
    const int32_t pinned[] = { 14, 15 };
    house.table.pin(house.map.layers[1].il, pinned, 2);
    house.pass(2, range(8, 14));
    house.table.set_limits(2, 6, House::N_EXPERT);
    house.table.set_limits(3, 0, 3);
    for (int token = 0; token < 200; ++token) {
        const int first = 2 * (token % 7);
        decode(house, 0, { first, first + 1 });
        decode(house, 1, { first, first + 1 });
        decode(house, 2, { 0, 1 });
        decode(house, 3, { first, first + 1 });
        CHECK(house.resident(1, 14) && house.resident(1, 15));
        CHECK(house.n_resident(2) >= 6 && house.n_resident(3) <= 3);
        CHECK(house.stats().used_bytes <= house.stats().budget_bytes);
    }
    CHECK(house.stats().evictions > 200);
    const auto of = values(house, 1);
    CHECK(*std::max_element(of.begin() + 14, of.end()) < *std::min_element(of.begin(), of.begin() + 14));
}

static void a_lowered_budget_keeps_what_is_worth_most_and_learning_goes_on() {
    House house(2, 0.75, PYORCH_LEARNED);        // 24 experts
    auto  decode_all = [&](int begin, int end) { // 0 to 3 in every other token, 4 to 11 in turns
        for (int token = begin; token < end; ++token) {
            for (int layer = 0; layer < 2; ++layer) {
                const int first = token % 2 ? 2 * (token / 2 % 2) : 4 + 2 * (token / 2 % 4);
                decode(house, layer, { first, first + 1 });
            }
        }
    };
    decode_all(0, 200);
    CHECK(house.n_resident(0) == 12 && house.n_resident(1) == 12);
    house.table.set_budget(house.map.floor_bytes());
    CHECK(house.stats().resident_experts == 16 && house.stats().used_bytes <= house.map.floor_bytes());
    for (int layer = 0; layer < 2; ++layer) {
        const auto          of = values(house, layer);
        std::vector<double> kept, gone;
        for (int id = 0; id < 12; ++id) {
            (house.resident(layer, id) ? kept : gone).push_back(of[id]);
        }
        CHECK(
            gone.empty() || *std::min_element(kept.begin(), kept.end()) >= *std::max_element(gone.begin(), gone.end()));
    }
    const auto before = values(house, 0);
    decode_all(200, 300);
    CHECK(values(house, 0) != before);
    house.table.set_budget(house.budget(0.75));
    decode_all(300, 308); // each comes once
    house.table.reset_stats();
    decode_all(308, 324);
    CHECK(house.stats().misses == 0 && house.stats().hits == 64);
}

static void what_others_stood_in_for_is_read_where_it_is_worth_more_than_what_goes() {
    House house(2, 0.5, PYORCH_LEARNED); // 16 experts
    house.pass(0, range(0, 15));
    const std::vector<int> stands_in = { 8 }, asked = { 7 };
    for (int token = 0; token < 60; ++token) {
        decode(house, 0, { 0 });
        house.table.acquire(house.owner, 1, { stands_in, asked, 1, true });
        house.reader.read_all();
        house.table.release(house.owner);
    }
    CHECK(house.stats().used_bytes == house.stats().budget_bytes && !house.resident(1, 7));
    house.table.defer(1, { 9, 7 });
    house.reader.read_all();
    CHECK(house.resident(1, 7) && !house.resident(1, 9) && house.n_resident(0) + house.n_resident(1) == 16);
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            what_follows_what_is_learned_and_valued,
            what_does_not_follow_on_teaches_no_table,
            what_was_learned_goes_on_from_its_copy,
            what_followed_a_moment_that_was_alike_is_valued,
            votes_are_discounted_by_the_first_use,
            the_oldest_moments_make_room,
            a_context_whose_place_was_taken_begins_anew,
            a_table_has_learned_from_all_layers_before_one_comes,
            pins_minima_and_limits_hold_for_what_is_worth_least,
            a_lowered_budget_keeps_what_is_worth_most_and_learning_goes_on,
            what_others_stood_in_for_is_read_where_it_is_worth_more_than_what_goes,
        });
}
