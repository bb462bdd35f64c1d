// What becomes of forecasts on their way to the residency table:
//
//     prefetcher_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "check.h"
#include "synthetic.h"

#include "banks/host_bank.h"
#include "prediction/expert_maps.h"
#include "prediction/predictor_list.h"
#include "prediction/prefetcher.h"
#include "residency/table.h"

#include <cmath>
#include <set>

using namespace pyorch;

// Names the first expert of each layer of a token.
class FirstExperts : public Predictor {
    void begin(const IterationBegin & iteration, std::vector<Forecast> & forecasts) override {
        for (int layer = 0; iteration.decode && layer < 3; ++layer) {
            forecasts.push_back({ layer, layer + 1, 0, { 0 }, {}, {} });
        }
    }

    void routed(const RoutedLayer &, std::vector<Forecast> &) override {}
};

// Three layers of eight experts.
struct House {
    static constexpr int N_LAYERS = 3;
    static constexpr int N_EXPERT = 8;

    House() :
            map(synthetic_map(path, N_LAYERS, N_EXPERT, [](int) { return 64; })),
            table(map, std::make_unique<HostBank>(map, map.slots_bytes()), call_source(touch_pages, nullptr),
                plain_codec(), {}),
            reader(table.loader()), routers(N_LAYERS), prefetcher(table, routers) {
        prefetcher.change([&](PrefetchPlanner & planner) {
            planner.set_oracle([](const std::vector<int> &) { return std::make_unique<FirstExperts>(); });
            for (int layer = 0; layer < N_LAYERS; ++layer) {
                planner.set(layer, { PYORCH_PREDICT_ORACLE, N_LAYERS, 0 });
            }
            planner.set_observer(
                [this](const void *, int, const Forecast & new_forecast) { forecast.insert(new_forecast.layer); });
        });
    }

    void decode_one(const void * context) {
        prefetcher.begin(context, { false, 1, {} });
        prefetcher.routed(context, { 0, 1, 1, false, { 0 }, {}, {}, {}, {}, {} });
        prefetcher.begin(context, { true, 1, {} });
        prefetcher.wait_idle();
    }

    const ModelMap map;
    Table          table;
    LocalReader    reader;
    Routers        routers;
    std::set<int>  forecast; // layers
    Prefetcher     prefetcher;
};

static void forecasts_are_of_layers_that_the_context_computes() {
    for (bool told : { false, true }) {
        House house;
        if (told) {
            house.prefetcher.set_layers(&house, { 0, 1 });
        }
        house.decode_one(&house);
        CHECK(house.forecast == (told ? std::set<int>{ 0, 1 } : std::set<int>{ 0, 1, 2 }));
    }
}

// An expert of the house that no layer needed before, read in read_ns.
static void need_a_new_expert(House & house, Owner & owner, int n) {
    const std::vector<int> one = { n / House::N_LAYERS };
    house.table.acquire(owner, n % House::N_LAYERS, { one, one, 1 });
    house.reader.read_all();
    CHECK(house.table.release(owner));
}

static void nothing_is_forecast_where_nothing_is_absent() {
    for (bool automatic : { false, true }) {
        House house;
        Owner owner = { &house };
        need_a_new_expert(house, owner, 0);
        house.prefetcher.set_automatic(automatic);
        house.decode_one(&house);
        CHECK(house.forecast.empty() == automatic);
        need_a_new_expert(house, owner, 1);
        house.decode_one(&house);
        CHECK(!house.forecast.empty());
        house.forecast.clear();
        house.decode_one(&house);
        CHECK(house.forecast.empty() == automatic);
    }
}

static void where_experts_are_absent_a_trial_decodes_without() {
    House house;
    Owner owner = { &house };
    house.prefetcher.set_automatic(true);
    int with = 0, without = 0;
    for (int token = 0; token < House::N_LAYERS * House::N_EXPERT; ++token) {
        need_a_new_expert(house, owner, token);
        house.prefetcher.begin(&house, { true, 1, {} });
        (house.prefetcher.wants() ? with : without) += 1;
        house.prefetcher.wait_idle();
    }
    CHECK(with >= 16 && without > 0); // it begins behind 16, and tries four with and four without by turns
}

static void default_vectors_of_another_width_are_not_used() {
    const std::vector<float> norm(4, 1.0f), gate = { 1, 2, 3, 4, 4, 3, 2, 2 };
    Router                   router;
    router.gate     = gate.data();
    router.norm     = norm.data();
    router.n_embd   = 4;
    router.n_expert = 2;
    router.n_used   = 1;
    PredictionModel model;
    model.n_expert                = { 2, 2 };
    model.routers                 = { Router(), router };
    model.gates                   = { nullptr, std::make_shared<const CompactMatrix>(gate.data(), 2, 4) };
    const RoutedLayer layer       = { 0, 1, 1, true, { 1 }, { 1 }, { 1.0f }, {}, {}, { 1, 2, 3, 4 } };
    const auto        probability = [&](std::shared_ptr<const CompactMatrix> defaults) {
        model.defaults = { std::move(defaults), nullptr };
        std::vector<Forecast> forecasts;
        make_quasi_hidden(model, { 0, 1 })->routed(layer, forecasts);
        CHECK(forecasts.size() == 1 && forecasts[0].layer == 1);
        return forecasts[0].probability;
    };
    const std::vector<float> without = probability(nullptr);
    for (int width : { 2, 4 }) {
        const std::vector<float> vectors(2 * width, 5.0f);
        const std::vector<float> with = probability(std::make_shared<const CompactMatrix>(vectors.data(), 2, width));
        CHECK((with == without) == (width != 4));
    }
}

int main(int argc, char ** argv) {
    return run(argc, argv,
        {
            forecasts_are_of_layers_that_the_context_computes,
            nothing_is_forecast_where_nothing_is_absent,
            where_experts_are_absent_a_trial_decodes_without,
            default_vectors_of_another_width_are_not_used,
        });
}
