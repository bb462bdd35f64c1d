// What becomes of forecasts on their way to the residency table:
//
//     prefetcher_test FILE.gguf
//
// FILE.gguf is written and removed.

#include "synthetic.h"

#include "banks/host_bank.h"
#include "prediction/expert_maps.h"
#include "prediction/predictors/predictors.h"
#include "prediction/prefetcher.h"
#include "residency/table.h"

#include <cmath>
#include <set>

using namespace pyorch;

#define CHECK(x) \
    do { if (!(x)) { fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #x); abort(); } } while (0)

static std::string path;

// Three layers of eight experts, of which a past request used the first in each.
struct House {
    static constexpr int N_LAYERS = 3;
    static constexpr int N_EXPERT = 8;

    House() :
        map(synthetic_map(path, N_LAYERS, N_EXPERT, [](int) { return 64; })),
        table(map, std::make_unique<HostBank>(map, map.slots_bytes()), call_source(touch_pages, nullptr), plain_codec, {}),
        reader(table.loader()), routers(N_LAYERS), prefetcher(table, routers) {
        auto history = std::make_shared<ExpertMaps>(N_LAYERS, N_EXPERT, 0, 4, 1, 4);
        std::vector<float> counts(N_LAYERS * N_EXPERT);
        for (int layer = 0; layer < N_LAYERS; ++layer) {
            counts[layer * N_EXPERT] = 1;
        }
        CHECK(history->requests.add(counts.data()));
        prefetcher.change([&](PrefetchPlanner & planner) {
            planner.set_maps(history);
            for (int layer = 0; layer < N_LAYERS; ++layer) {
                planner.set(layer, { PYORCH_PREDICT_ACTIVATION_MATRIX, N_LAYERS, 0 });
            }
            planner.set_observer([this](const void *, int, const Forecast & it) { forecast.insert(it.layer); });
        });
    }

    void decode_one(const void * context) {
        prefetcher.begin(context, { true, false, 1, {} });
        prefetcher.routed(context, { 0, 1, 1, false, { 0 }, {}, {}, {}, {}, {} });
        prefetcher.begin(context, { false, true, 1, {} });
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
        CHECK(house.forecast == (told ? std::set<int> { 0, 1 } : std::set<int> { 0, 1, 2 }));
    }
}

static void nothing_is_forecast_where_prefetching_does_not_pay() {
    for (bool automatic : { false, true }) {
        House house;
        Owner owner = { &house };
        const std::vector<int> one = { 0 };
        house.table.acquire(owner, 0, { one, one, 1 });
        house.reader.read_all(); // in no time
        CHECK(house.table.release(owner));
        house.prefetcher.set_automatic(automatic);
        house.decode_one(&house);
        CHECK(house.forecast.empty() == automatic);
    }
}

static void default_vectors_of_another_width_are_not_used() {
    const std::vector<float> norm(4, 1.0f);
    Router router;
    router.norm     = norm.data();
    router.n_embd   = 4;
    router.n_expert = 2;
    const RoutedLayer layer = { 0, 1, 1, true, { 1 }, { 1 }, { 1.0f }, {}, {}, { 1, 2, 3, 4 } };
    std::vector<float> without, with;
    CHECK(quasi_hidden_state(layer, 0, router, nullptr, without));
    for (size_t width : { 2, 4 }) {
        const DefaultVectors defaults = { std::vector<float>(2 * width, 5.0f) };
        CHECK(quasi_hidden_state(layer, 0, router, &defaults, with));
        CHECK((with == without) == (width != 4));
    }
}

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    path = argv[1];
    forecasts_are_of_layers_that_the_context_computes();
    nothing_is_forecast_where_prefetching_does_not_pay();
    default_vectors_of_another_width_are_not_used();
    printf("all hold\n");
}
