// Who is in the slots of a device: claims about native/src/residency/device_table.h.

#include "check.h"
#include "residency/device_table.h"

#include <algorithm>
#include <set>

using namespace pyorch;

namespace {

// Two layers of 4 experts that share 3 slots, and one with a pool of its own of one slot.
DeviceTable table(pyorch_policy policy = PYORCH_LRU) {
    return DeviceTable({ 4, 4, 4 }, { 0, 0, 1 }, { 3, 1 }, policy);
}

// An expert is used; a layer without experts of its own to compute with brings nothing.
void ask(DeviceTable & t, int layer, int expert) {
    t.pass(layer, { {}, { expert }, {}, 1 });
}

void bring(DeviceTable & t, int layer, int expert, bool must = true) {
    bool took;
    ask(t, layer, expert);
    CHECK(t.admit(layer, expert, must, took) != DeviceTable::NONE);
    t.arrived(layer, expert);
}

void slots_are_given_once() {
    DeviceTable t = table();
    bring(t, 0, 0);
    bring(t, 0, 1);
    bring(t, 1, 0);
    const std::set<int> slots = { t.slot(0, 0), t.slot(0, 1), t.slot(1, 0) };
    CHECK(slots == std::set<int>({ 0, 1, 2 }));
    CHECK(t.n_there(0) == 2 && t.n_there(1) == 1);
}

void the_least_valuable_of_all_layers_of_a_pool_goes() {
    DeviceTable t = table();
    bring(t, 1, 3);
    bring(t, 0, 0);
    bring(t, 0, 1);
    bring(t, 2, 2);
    bring(t, 0, 2);
    CHECK(t.slot(1, 3) == DeviceTable::NONE && t.counts(1).evictions == 1);
    CHECK(t.slot(0, 0) != DeviceTable::NONE && t.slot(2, 2) != DeviceTable::NONE);
}

void what_is_held_or_coming_stays() {
    DeviceTable t = table();
    bool        took;
    bring(t, 0, 0);
    t.hold(0, 0);
    bring(t, 0, 1);
    t.hold(0, 1);
    ask(t, 0, 2);
    CHECK(t.admit(0, 2, true, took) != DeviceTable::NONE && !took);
    CHECK(t.slot(0, 2) == DeviceTable::NONE && t.known(0, 2)); // it is coming
    ask(t, 1, 1);
    CHECK(t.admit(1, 1, true, took) == DeviceTable::NONE);
    t.unhold(0, 1);
    CHECK(t.admit(1, 1, true, took) != DeviceTable::NONE && took);
    CHECK(!t.known(0, 1));
}

void what_is_worth_less_is_not_admitted_unless_it_must() {
    DeviceTable t = table(PYORCH_LFU);
    bool        took;
    for (int time = 0; time < 3; ++time) {
        ask(t, 2, 0);
    }
    CHECK(t.admit(2, 0, false, took) != DeviceTable::NONE);
    t.arrived(2, 0);
    ask(t, 2, 1);
    CHECK(t.admit(2, 1, false, took) == DeviceTable::NONE);
    CHECK(t.slot(2, 0) != DeviceTable::NONE && t.counts(2).evictions == 0);
    CHECK(t.admit(2, 1, true, took) != DeviceTable::NONE && took);
}

void what_did_not_come_leaves_its_slot() {
    DeviceTable t = table();
    bool        took;
    ask(t, 2, 0);
    const int slot = t.admit(2, 0, true, took);
    t.abandon(2, 0);
    CHECK(!t.known(2, 0) && t.n_there(2) == 0 && t.counts(2).loads == 0);
    ask(t, 2, 1);
    CHECK(t.admit(2, 1, false, took) == slot && !took);
}

// What is there of a table in which each layer's two experts of a token come, by a policy.
std::set<int> after(pyorch_policy policy, const std::vector<std::vector<int>> & tokens,
    const std::vector<std::vector<double>> & learned = {}) {
    DeviceTable            t = { { 8 }, { 0 }, { 3 }, policy };
    const std::vector<int> rows(8, 1);
    for (size_t i = 0; i < tokens.size(); ++i) {
        const DevicePass pass = t.pass(0, { tokens[i], tokens[i], rows, 2 }, learned.empty() ? nullptr : &learned[i]);
        for (int expert : pass.behind) {
            t.arrived(0, expert);
        }
        for (int expert : tokens[i]) {
            if (pass.slots[expert] != DeviceTable::NONE) {
                t.unhold(0, expert);
            }
        }
    }
    std::set<int> there;
    for (int expert = 0; expert < 8; ++expert) {
        if (t.slot(0, expert) != DeviceTable::NONE) {
            there.insert(expert);
        }
    }
    return there;
}

void every_policy_says_what_goes() {
    const std::vector<std::vector<int>> tokens = { { 0, 1 }, { 0, 2 }, { 0, 3 }, { 4 } };
    CHECK(after(PYORCH_LRU, tokens) == std::set<int>({ 0, 3, 4 }));
    CHECK(after(PYORCH_FIFO, tokens) == std::set<int>({ 2, 3, 4 }));
    CHECK(after(PYORCH_LFU, tokens).count(0) == 1);
    CHECK(after(PYORCH_LEAST_STALE, tokens).count(4) == 1);
    // Full of what is marked, the phase ends with the first that must go; what was just used is of the next one.
    CHECK(after(PYORCH_MARKING, { { 0, 1 }, { 2 }, { 3 }, { 4 } }).count(4) == 1);
    // What is learned counts, and what was just used no more than that.
    const std::vector<double> value = { 0.1, 0.9, 0.15, 0.8, 0.05, 0, 0, 0 };
    CHECK(after(PYORCH_LEARNED, tokens, { value, value, value, value }) == std::set<int>({ 0, 1, 3 }));
}

void a_layer_keeps_its_minimum_and_takes_no_more_than_its_most() {
    DeviceTable t = table();
    t.set_limits(0, 1, 2);
    for (int expert = 0; expert < 4; ++expert) {
        bring(t, 0, expert);
    }
    CHECK(t.n_there(0) == 2 && t.slot(0, 3) != DeviceTable::NONE && t.slot(0, 2) != DeviceTable::NONE);
    for (int expert = 0; expert < 2; ++expert) {
        bring(t, 1, expert);
    }
    CHECK(t.n_there(1) == 2 && t.n_there(0) == 1); // a slot was free, then one of two went
    bring(t, 1, 2);
    CHECK(t.n_there(1) == 2 && t.n_there(0) == 1);
}

void who_asks_is_told_what_came_and_went() {
    DeviceTable t = table();
    std::vector<int> told;
    const auto       tell = [&](int layer, const std::vector<uint8_t> & known) {
        told.push_back(layer * 100 + (int) std::count(known.begin(), known.end(), 1));
    };
    bring(t, 0, 0);
    bring(t, 0, 1);
    bring(t, 0, 2);
    t.tell_moved(tell);
    CHECK(told == std::vector<int>({ 3 }));
    bring(t, 1, 0);
    t.tell_moved(tell);
    std::sort(told.begin(), told.end());
    CHECK(told == std::vector<int>({ 2, 3, 101 }));
    t.tell_moved(tell);
    CHECK(told.size() == 3);
}

// Uploading takes 4, the processor 3 for an expert's first row and 2 for each further one, the device next to nothing.
constexpr DeviceRates RATES = { 1.0 / 4, 1.0 / 3, 1.0 / 2, 1e3, 1e3 };

void an_upload_pays_where_the_processor_would_take_longer() {
    CHECK(uploads_that_pay(RATES, 1, {}, { 1, 1 }, 2) == 0);    // 6, or 4 + 3, or 8
    CHECK(uploads_that_pay(RATES, 1, {}, { 3, 1 }, 2) == 1);    // 7 + 3, or 4 + 3, or 8
    CHECK(uploads_that_pay(RATES, 1, {}, { 3, 1 }, 0) == 0);    // nothing can be
    CHECK(uploads_that_pay(RATES, 1, {}, { 4, 4, 4 }, 3) == 3); // 27, or 4 + 18, or 8 + 9, or 12
    // A device that has much to do itself is given less.
    const DeviceRates slow = { 1.0 / 4, 1.0 / 3, 1.0 / 2, 1, 1 };
    CHECK(uploads_that_pay(slow, 1, {}, { 3, 3 }, 2) == 1); // 14, or 4 + 7, or 8 + 6
    CHECK(uploads_that_pay(slow, 1, { 8, 8 }, { 3, 3 }, 2) == 0);
}

void what_pays_comes_first_and_the_rest_behind() {
    DeviceTable t = { { 8 }, { 0 }, { 3 }, PYORCH_LRU };
    t.set_misses(PYORCH_ESTIMATED, RATES, { 1 });
    const DevicePass pass = t.pass(0, { { 1, 2, 3 }, { 1, 2, 3 }, { 0, 1, 4, 1, 0, 0, 0, 0 }, 4 });
    CHECK(pass.uploads == std::vector<int>({ 2 }) && pass.behind == std::vector<int>({ 1, 3 }));
    for (int expert : { 1, 2, 3 }) {
        t.arrived(0, expert);
    }
    // Of a prompt, nothing comes that does not pay; and what is worth less than all that is there has no slot.
    const DevicePass prompt = t.pass(0, { { 4, 5 }, { 4, 5 }, { 0, 0, 0, 0, 9, 1, 0, 0 }, 9 });
    CHECK(prompt.uploads.empty() && prompt.behind.empty());
}

} // namespace

int main() {
    for (auto * claim : { slots_are_given_once, the_least_valuable_of_all_layers_of_a_pool_goes,
             what_is_held_or_coming_stays, what_is_worth_less_is_not_admitted_unless_it_must,
             what_did_not_come_leaves_its_slot, every_policy_says_what_goes,
             a_layer_keeps_its_minimum_and_takes_no_more_than_its_most, who_asks_is_told_what_came_and_went,
             an_upload_pays_where_the_processor_would_take_longer, what_pays_comes_first_and_the_rest_behind }) {
        claim();
    }
    return 0;
}
