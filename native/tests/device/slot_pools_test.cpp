// Who is in the slots of a device: claims about native/src/device/slot_pools.h.

#include "check.h"
#include "replay/policies/replay_policies.h"
#include "device/slot_pools.h"

#include <algorithm>
#include <set>

using namespace pyorch;

namespace {

// Two layers of 4 experts that share 3 slots, and one with a pool of its own of one slot.
SlotPools table(pyorch_policy policy = PYORCH_LRU) { return SlotPools({ 4, 4, 4 }, { 0, 0, 1 }, { 3, 1 }, policy); }

// An expert is used; a layer without experts of its own to compute with brings nothing.
void ask(SlotPools & t, int layer, int expert) { t.pass(layer, { {}, { expert }, 1 }); }

void bring(SlotPools & t, int layer, int expert, bool must = true) {
    bool took;
    ask(t, layer, expert);
    CHECK(t.admit(layer, expert, must, took) != SlotPools::NONE);
    t.arrived(layer, expert);
}

void slots_are_given_once() {
    SlotPools t = table();
    bring(t, 0, 0);
    bring(t, 0, 1);
    bring(t, 1, 0);
    const std::set<int> slots = { t.slot(0, 0), t.slot(0, 1), t.slot(1, 0) };
    CHECK(slots == std::set<int>({ 0, 1, 2 }));
    CHECK(t.seats.n_resident(0) == 2 && t.seats.n_resident(1) == 1);
}

void the_least_valuable_of_all_layers_of_a_pool_goes() {
    SlotPools t = table();
    bring(t, 1, 3);
    bring(t, 0, 0);
    bring(t, 0, 1);
    bring(t, 2, 2);
    bring(t, 0, 2);
    CHECK(t.slot(1, 3) == SlotPools::NONE && t.seats.counts(1).device_evictions == 1);
    CHECK(t.slot(0, 0) != SlotPools::NONE && t.slot(2, 2) != SlotPools::NONE);
}

void what_is_held_or_coming_stays() {
    SlotPools t = table();
    bool      took;
    bring(t, 0, 0);
    t.hold(0, 0);
    bring(t, 0, 1);
    t.hold(0, 1);
    ask(t, 0, 2);
    CHECK(t.admit(0, 2, true, took) != SlotPools::NONE && !took);
    CHECK(t.slot(0, 2) == SlotPools::NONE && t.known(0, 2)); // it is coming
    ask(t, 1, 1);
    CHECK(t.admit(1, 1, true, took) == SlotPools::NONE);
    t.unhold(0, 1);
    CHECK(t.admit(1, 1, true, took) != SlotPools::NONE && took);
    CHECK(!t.known(0, 1));
}

void what_is_worth_less_is_not_admitted_unless_it_must() {
    SlotPools t = table(PYORCH_LFU);
    bool      took;
    for (int time = 0; time < 3; ++time) {
        ask(t, 2, 0);
    }
    CHECK(t.admit(2, 0, false, took) != SlotPools::NONE);
    t.arrived(2, 0);
    ask(t, 2, 1);
    CHECK(t.admit(2, 1, false, took) == SlotPools::NONE);
    CHECK(t.slot(2, 0) != SlotPools::NONE && t.seats.counts(2).device_evictions == 0);
    CHECK(t.admit(2, 1, true, took) != SlotPools::NONE && took);
}

void what_is_only_newer_takes_no_place() {
    for (pyorch_policy policy : { PYORCH_LRU, PYORCH_FIFO, PYORCH_MARKING }) {
        SlotPools                           t      = { { 8 }, { 0 }, { 2 }, policy, replay_policies() };
        const std::vector<std::vector<int>> tokens = { { 0, 1 }, { 2 }, { 3 }, { 4 }, { 5, 6 } };
        for (const std::vector<int> & token : tokens) {
            for (int expert : t.pass(0, { token, token, (int) token.size() }).behind) {
                t.arrived(0, expert);
            }
        }
        CHECK(t.slot(0, 0) == 0 || t.slot(0, 1) == 0);
        CHECK(t.known(0, 0) && t.known(0, 1) && t.seats.counts(0).device_evictions == 0);
    }
}

// With --device-misses upload.
void what_must_come_and_is_not_worth_it_passes_through() {
    SlotPools t = { { 8 }, { 0 }, { 3 }, PYORCH_LFU };
    t.set_misses(PYORCH_UPLOAD);
    const auto ask_for = [&](const std::vector<int> & experts) {
        const DevicePass pass = t.pass(0, { experts, experts, 1 });
        for (int expert : pass.uploads) {
            t.arrived(0, expert);
        }
        for (int expert : experts) {
            if (pass.slots[expert] != SlotPools::NONE) {
                t.unhold(0, expert);
            }
        }
        return pass.uploads.size();
    };
    std::vector<uint8_t> known;
    const auto           tell = [&](int, const std::vector<uint8_t> & told) { known = told; };
    for (int time = 0; time < 3; ++time) {
        ask_for({ 0, 1 });
    }
    ask_for({ 2 });
    for (int expert = 3; expert < 7; ++expert) {
        CHECK(ask_for({ expert }) == 1);
        CHECK(t.known(0, 0) && t.known(0, 1) && t.known(0, expert));
        t.tell_moved(tell);
        CHECK(!known[expert]); // host memory need not let it go
    }
    CHECK(ask_for({ 6 }) == 0); // it was used again while it was there: now it stays
    t.tell_moved(tell);
    CHECK(known[6]);
    CHECK(ask_for({ 3, 4, 5 }) == 3); // all of them at once, whatever goes
    // One that is used more and more gets a slot to stay in.
    for (int time = 0; time < 6; ++time) {
        ask_for({ 7 });
    }
    t.tell_moved(tell);
    CHECK(known[7]);
    // A limit of the layer holds for those that pass through, too.
    ask_for({ 2 });
    t.set_limits(0, 0, 1);
    CHECK(t.seats.n_resident(0) == 1 && t.known(0, 7));
}

void what_did_not_come_leaves_its_slot() {
    SlotPools t = table();
    bool      took;
    ask(t, 2, 0);
    const int slot = t.admit(2, 0, true, took);
    t.abandon(2, 0);
    CHECK(!t.known(2, 0) && t.seats.n_resident(2) == 0 && t.seats.counts(2).device_loads == 0);
    ask(t, 2, 1);
    CHECK(t.admit(2, 1, false, took) == slot && !took);
}

// What is there of a table in which each layer's two experts of a token come, by a policy.
std::set<int> after(pyorch_policy policy, const std::vector<std::vector<int>> & tokens,
    const std::vector<std::vector<double>> & learned = {}) {
    SlotPools t = { { 8 }, { 0 }, { 3 }, policy, replay_policies() };
    for (size_t i = 0; i < tokens.size(); ++i) {
        const DevicePass pass =
            t.pass(0, { tokens[i], tokens[i], 2 }, learned.empty() ? std::vector<double>() : learned[i]);
        for (int expert : pass.behind) {
            t.arrived(0, expert);
        }
        for (int expert : tokens[i]) {
            if (pass.slots[expert] != SlotPools::NONE) {
                t.unhold(0, expert);
            }
        }
    }
    std::set<int> residents;
    for (int expert = 0; expert < 8; ++expert) {
        if (t.slot(0, expert) != SlotPools::NONE) {
            residents.insert(expert);
        }
    }
    return residents;
}

void every_policy_says_what_goes() {
    const std::vector<std::vector<int>> tokens = { { 0, 1 }, { 0, 2 }, { 0, 3 }, { 4 } };
    const std::vector<std::vector<int>> again  = { { 0 }, { 1 }, { 0 }, { 2 }, { 3 }, { 3 }, { 3 } };
    CHECK(after(PYORCH_LRU, again) == std::set<int>({ 0, 2, 3 }));
    const std::vector<std::vector<int>> oldest = { { 0 }, { 1 }, { 2 }, { 0 }, { 3 }, { 3 }, { 3 }, { 3 }, { 3 } };
    CHECK(after(PYORCH_FIFO, oldest) == std::set<int>({ 1, 2, 3 }));
    CHECK(after(PYORCH_LFU, tokens).count(0) == 1);
    // Full of what is marked, the phase ends with the first that must go; what was just used is of the next one.
    CHECK(after(PYORCH_MARKING, { { 0, 1 }, { 2 }, { 3 }, { 3 }, { 3 } }).count(3) == 1);
    // What is learned counts, and what was just used no more than that.
    const std::vector<double> value = { 0.1, 0.9, 0.15, 0.8, 0.05, 0, 0, 0 };
    CHECK(after(PYORCH_LEARNED, tokens, { value, value, value, value }) == std::set<int>({ 0, 1, 3 }));
}

void a_layer_keeps_its_minimum_and_takes_no_more_than_its_most() {
    SlotPools t = table();
    t.set_limits(0, 1, 2);
    for (int expert = 0; expert < 4; ++expert) {
        bring(t, 0, expert);
    }
    CHECK(t.seats.n_resident(0) == 2 && t.slot(0, 3) != SlotPools::NONE);
    for (int expert = 0; expert < 2; ++expert) {
        bring(t, 1, expert);
    }
    CHECK(t.seats.n_resident(1) == 2 && t.seats.n_resident(0) == 1); // a slot was free, then one of two went
    bring(t, 1, 2);
    CHECK(t.seats.n_resident(1) == 2 && t.seats.n_resident(0) == 1);
}

void who_asks_is_told_what_came_and_went() {
    SlotPools        t = table();
    std::vector<int> told;
    const auto       tell = [&](int layer, const std::vector<uint8_t> & known) {
        told.push_back(layer * 100 + (int) std::count(known.begin(), known.end(), 1));
    };
    bring(t, 0, 0);
    bring(t, 0, 1);
    bring(t, 0, 2);
    t.tell_moved(tell);
    CHECK(told == std::vector<int>({ 3 }));
    ask(t, 1, 0);
    ask(t, 1, 0);
    bring(t, 1, 0); // it was used more often than what goes
    t.tell_moved(tell);
    std::sort(told.begin(), told.end());
    CHECK(told == std::vector<int>({ 2, 3, 101 }));
    t.tell_moved(tell);
    CHECK(told.size() == 3);
}

// One layer of 32 experts and 16 slots, 3 of them for ordered experts, one at a time; a context asks for one expert each
// time.
struct OrderedExperts {
    SlotPools        table = { { 32 }, { 0 }, { 16 }, PYORCH_LFU };
    const int        me    = 0;
    std::vector<int> held, behind;

    OrderedExperts() { table.set_ahead(1); }

    // What comes for a forecast is there in time, or late.
    void pass(int expert, const std::vector<ForecastExpert> & forecast = {}, bool late = false) {
        std::for_each(behind.begin(), behind.end(), [&](int e) { table.arrived(0, e); });
        table.order(&me, 0, forecast, 0.5);
        for (int ordered : std::vector<int>(table.ordered(&me, 0))) {
            if (ordered != expert || !late) {
                table.arrived(0, ordered);
            }
            if (ordered != expert) {
                table.abandon(0, ordered);
            }
        }
        std::for_each(held.begin(), held.end(), [&](int e) { table.unhold(0, e); });
        const std::vector<int> asked = { expert };
        const DevicePass       pass  = table.pass(0, { asked, asked, 1, &me });
        held.clear();
        for (int e : pass.uploads) {
            table.arrived(0, e);
            table.hold(0, e);
            held.push_back(e);
        }
        if (pass.slots[expert] != SlotPools::NONE) {
            held.push_back(expert);
        }
        behind = pass.behind;
    }
};

void a_guest_serves_the_pass_that_it_came_for() {
    for (bool late : { false, true }) {
        OrderedExperts fixture;
        for (int expert = 0; expert < 13; ++expert) {
            fixture.pass(expert);
            fixture.pass(expert);
        }
        fixture.pass(20, { { 20, 0, 1 } }, late);
        pyorch_stats & counts = fixture.table.seats.counts(0);
        CHECK(counts.device_ahead == 1 && counts.device_ahead_hits == 1 && counts.device_ahead_late == late);
        CHECK(counts.device_hits == 13 + 1 && counts.device_evictions == 0); // all others had been worth two uses
        CHECK(fixture.table.coming_to(0, 20) != SlotPools::NONE && fixture.table.slot(0, 20) == SlotPools::NONE);
        fixture.pass(0);
        CHECK(!fixture.table.known(0, 20) && fixture.table.seats.n_resident(0) == 13);
    }
}

void a_guest_that_is_worth_it_stays_and_another_slot_is_kept() {
    OrderedExperts fixture;
    for (int expert = 0; expert < 13; ++expert) {
        fixture.pass(expert);
    }
    for (int use = 0; use < 3; ++use) {
        fixture.pass(20, { { 20, 0, 1 } });
        fixture.pass(0);
    }
    pyorch_stats & counts = fixture.table.seats.counts(0);
    CHECK(counts.device_evictions == 1 && fixture.table.slot(0, 20) != SlotPools::NONE &&
        fixture.table.seats.n_resident(0) == 13);
    const uint64_t loads = counts.device_loads;
    std::set<int>  slots;
    for (int expert = 0; expert < 32; ++expert) {
        slots.insert(fixture.table.coming_to(0, expert));
    }
    CHECK(slots.size() == 13 + 1 && fixture.table.slots_for(0) == 13); // and NONE
    fixture.pass(20, { { 20, 0, 1 } });                                // it is there: nothing is ordered
    CHECK(counts.device_loads == loads);
}

void another_contexts_guest_is_not_computed_with() {
    SlotPools t = { { 8 }, { 0 }, { 12 }, PYORCH_LFU };
    t.set_ahead(1);
    const int a = 0, b = 0;
    CHECK(t.order(&a, 0, { { 5, 0, 1 } }, 0) == std::vector<int>({ 5 }));
    CHECK(t.order(&b, 0, { { 5, 0, 1 } }, 0).empty());
    t.arrived(0, 5);
    const std::vector<int> asked = { 5 };
    CHECK(t.pass(0, { asked, asked, 1, &b }).slots[5] == SlotPools::NONE);
    CHECK(t.layers_ordered(&a) == std::vector<int>({ 0 }) && t.layers_ordered(&b).empty());
    const DevicePass pass = t.pass(0, { asked, asked, 1, &a });
    CHECK(pass.slots[5] != SlotPools::NONE && t.seats.counts(0).device_ahead_hits == 1);
    CHECK(pass.ordered.empty()); // a slot was free for it
}

// Uses of 24 experts, some of them more often than others; who forecasts names one that is used, or one that is not.
void forecasts_that_are_wrong_upload_nothing() {
    for (bool right : { false, true }) {
        OrderedExperts with;
        uint32_t       state = 1;
        for (int time = 0; time < 2000; ++time) {
            state            = state * 1664525 + 1013904223;
            const int expert = (int) ((uint64_t) (state >> 8) * (state >> 8) >> 32) * 24 / (1 << 16);
            with.pass(expert, { { right ? expert : 31, 0, 1 } });
        }
        const pyorch_stats & found = with.table.seats.counts(0);
        CHECK(right ? found.device_ahead_hits == found.device_ahead && found.device_ahead > 50 :
                      found.device_ahead < 10 && found.device_ahead_hits == 0);
        CHECK(with.table.slots_for(0) == 13);
    }
}

} // namespace

int main() {
    for (auto * claim : { slots_are_given_once, the_least_valuable_of_all_layers_of_a_pool_goes,
             what_is_held_or_coming_stays, what_is_worth_less_is_not_admitted_unless_it_must,
             what_is_only_newer_takes_no_place, what_must_come_and_is_not_worth_it_passes_through,
             what_did_not_come_leaves_its_slot, every_policy_says_what_goes,
             a_layer_keeps_its_minimum_and_takes_no_more_than_its_most, who_asks_is_told_what_came_and_went,
             a_guest_serves_the_pass_that_it_came_for, a_guest_that_is_worth_it_stays_and_another_slot_is_kept,
             another_contexts_guest_is_not_computed_with, forecasts_that_are_wrong_upload_nothing }) {
        claim();
    }
    return 0;
}
