// The decode stage:
//
//     decode_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "residency/house.h"

#include "base/barrier.h"
#include "loading/readers.h"

#include <thread>

using namespace pyorch;

class Damaged : public Codec {
public:
    const char * decode(const ExpertTensor & tensor, char *, char * read) const override {
        return tensor.role == "down" ? nullptr : read;
    }
};

static void an_expert_that_does_not_decode_fails_its_layer_with_a_sentence() {
    static const Damaged damaged;
    House                house(2, 1, PYORCH_LRU, [](int) { return SMALL; }, damaged);
    house.table.acquire(house.owner, 0, { ALL, ALL, 1 });
    house.reader.read_all();
    const char * zeros = house.table.address(house.owner, 0, 3, 2, true);
    CHECK(zeros && zeros[0] == 0 && house.table.address(house.owner, 0, 3, 0, true) != zeros);
    CHECK(!house.table.release(house.owner));
    CHECK(house.table.last_error().find("ffn_down_exps") != std::string::npos);
    CHECK(house.table.last_error().find("damaged") != std::string::npos);
    CHECK(house.stats().resident_experts == 0 && house.stats().failures == 1);
}

// As many threads meet as there are processors, so those that decode have none beside them.
static void leave_no_processor_to_spare() {
    const Barrier            barrier = adaptive_barrier();
    const int                n       = std::max(2, (int) std::thread::hardware_concurrency());
    alignas(64) int          arrived = 0;
    alignas(64) int          passed  = 0;
    std::vector<std::thread> threads;
    for (int i = 0; barrier && i < n; ++i) {
        threads.emplace_back([&] { barrier(&arrived, &passed, n); });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
}

static void what_nobody_waits_for_is_decoded_all_the_same() {
    leave_no_processor_to_spare();
    House         house(2, 1);
    DecodeThreads threads(house.table.loader(), 1);
    house.pass(0, { 0 });
    house.want(house.owner, 1, 0, { 5 });
    for (ReadRequest request; house.table.loader().try_next(request);) {
        const int64_t n = house.table.loader().bytes().read(request.file, request.offset, request.buf, request.size);
        if (house.table.loader().read(request, n, 1)) {
            house.table.loader().decode_later(request);
        }
    }
    while (!house.resident(1, 5)) {
        std::this_thread::yield();
    }
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            an_expert_that_does_not_decode_fails_its_layer_with_a_sentence,
            what_nobody_waits_for_is_decoded_all_the_same,
        });
}
