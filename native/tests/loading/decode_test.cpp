// The decode stage:
//
//     decode_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "residency/house.h"

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

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            an_expert_that_does_not_decode_fails_its_layer_with_a_sentence,
        });
}
