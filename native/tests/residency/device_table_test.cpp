// Who is in the slots of a device: claims about native/src/residency/device_table.h.

#include "check.h"
#include "residency/device_table.h"

#include <set>

using namespace pyorch;

namespace {

// Two layers of 4 experts that share 3 slots, and one with a pool of its own of one slot.
DeviceTable table(pyorch_policy policy = PYORCH_LRU) {
    return DeviceTable({ 4, 4, 4 }, { 0, 0, 1 }, { 3, 1 }, policy);
}

void bring(DeviceTable & t, int layer, int expert, bool must = true) {
    bool took;
    t.pass(layer, { expert });
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
    t.pass(0, { 2 });
    CHECK(t.admit(0, 2, true, took) != DeviceTable::NONE && !took);
    CHECK(t.slot(0, 2) == DeviceTable::NONE && t.known(0, 2)); // it is coming
    t.pass(1, { 1 });
    CHECK(t.admit(1, 1, true, took) == DeviceTable::NONE);
    t.unhold(0, 1);
    CHECK(t.admit(1, 1, true, took) != DeviceTable::NONE && took);
    CHECK(!t.known(0, 1));
}

void what_is_worth_less_is_not_admitted_unless_it_must() {
    DeviceTable t = table(PYORCH_LFU);
    bool        took;
    for (int time = 0; time < 3; ++time) {
        t.pass(2, { 0 });
    }
    CHECK(t.admit(2, 0, false, took) != DeviceTable::NONE);
    t.arrived(2, 0);
    t.pass(2, { 1 });
    CHECK(t.admit(2, 1, false, took) == DeviceTable::NONE);
    CHECK(t.slot(2, 0) != DeviceTable::NONE && t.counts(2).evictions == 0);
    CHECK(t.admit(2, 1, true, took) != DeviceTable::NONE && took);
}

void what_did_not_come_leaves_its_slot() {
    DeviceTable t = table();
    bool        took;
    t.pass(2, { 0 });
    const int slot = t.admit(2, 0, true, took);
    t.abandon(2, 0);
    CHECK(!t.known(2, 0) && t.n_there(2) == 0 && t.counts(2).loads == 0);
    t.pass(2, { 1 });
    CHECK(t.admit(2, 1, false, took) == slot && !took);
}

} // namespace

int main() {
    for (auto * claim : { slots_are_given_once, the_least_valuable_of_all_layers_of_a_pool_goes,
             what_is_held_or_coming_stays, what_is_worth_less_is_not_admitted_unless_it_must,
             what_did_not_come_leaves_its_slot }) {
        claim();
    }
    return 0;
}
