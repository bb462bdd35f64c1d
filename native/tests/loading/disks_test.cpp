// Which of several disks reads:
//
//     disks_test FILE

#include "loading/disks.h"

#include "check.h"

#include <thread>

using namespace pyorch;

static constexpr uint64_t BYTES = 1 << 20;

static bool any(int) { return true; }

// A request that takes a millisecond.
static int read_one(Disks & disks, bool (*usable)(int)) {
    const int disk = disks.begin(BYTES, usable);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    disks.end(disk, BYTES, BYTES);
    return disk;
}

static void a_disk_that_is_not_known_gets_one_request_beside_those_that_are() {
    Disks disks(2);
    CHECK(read_one(disks, [](int disk) { return disk == 0; }) == 0);
    int n_unknown = 0;
    for (int i = 0; i < 8; ++i) {
        n_unknown += disks.begin(BYTES, any) == 1;
    }
    CHECK(n_unknown == 1);
}

static void one_that_may_be_used_reads_whatever_is_under_way_there() {
    Disks disks(2);
    read_one(disks, [](int disk) { return disk == 0; });
    for (int i = 0; i < 3; ++i) {
        CHECK(disks.begin(BYTES, [](int disk) { return disk == 1; }) == 1);
    }
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            a_disk_that_is_not_known_gets_one_request_beside_those_that_are,
            one_that_may_be_used_reads_whatever_is_under_way_there,
        });
}
