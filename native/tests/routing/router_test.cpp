// What is made of a router's logits: choice, weights and distribution of each gating function, with biases and groups.

#include "prediction/router.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>

using namespace pyorch;

static void require(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

static bool near(double a, double b) { return std::abs(a - b) < 1e-6; }

static const std::vector<float> LOGITS = { 0.3f, 1.7f, -0.4f, 0.9f, -2.0f, 1.1f };

static Router router_with(pyorch_gating gating) {
    static const float gate = 0;
    Router             router;
    router.gate     = &gate;
    router.gating   = gating;
    router.n_expert = (int) LOGITS.size();
    router.n_used   = 2;
    return router;
}

static double gated(pyorch_gating gating, int e) {
    const double z = LOGITS[e];
    switch (gating) {
    case PYORCH_GATING_SIGMOID: return 1 / (1 + std::exp(-z));
    case PYORCH_GATING_SQRT_SOFTPLUS: return std::sqrt(std::log1p(std::exp(z)));
    default: {
        double sum = 0;
        for (float other : LOGITS) {
            sum += std::exp((double) other);
        }
        return std::exp(z) / sum;
    }
    }
}

static void weights_are_those_that_the_model_makes() {
    for (auto gating :
        { PYORCH_GATING_SOFTMAX, PYORCH_GATING_SIGMOID, PYORCH_GATING_SOFTMAX_SELECTED, PYORCH_GATING_SQRT_SOFTPLUS }) {
        for (bool normalized : { false, true }) {
            Router router       = router_with(gating);
            router.normalized   = normalized;
            router.scale        = 2.5f;
            const Choice choice = choose(router, LOGITS, 4);
            require(choice.experts == std::vector<int>{ 1, 5, 3, 0 }, "the likeliest come first");
            require(choice.weights.size() == 2, "weights are of the selected");
            const double a = gated(gating, 1), b = gated(gating, 5);
            const bool   shares = normalized || gating == PYORCH_GATING_SOFTMAX_SELECTED;
            require(near(choice.weights[0], 2.5 * (shares ? a / (a + b) : a)), "weight of the first");
            require(near(choice.weights[1], 2.5 * (shares ? b / (a + b) : b)), "weight of the second");
            double all = 0;
            for (size_t e = 0; e < LOGITS.size(); ++e) {
                all += gated(gating, (int) e);
            }
            for (size_t e = 0; e < LOGITS.size(); ++e) {
                require(near(choice.probability[e], gated(gating, (int) e) / all), "probabilities have the sum 1");
            }
        }
    }
}

static void a_selection_bias_selects_and_does_not_weigh() {
    const float bias[]    = { 0, 0, 0.9f, 0, 0.2f, 0 };
    Router      router    = router_with(PYORCH_GATING_SIGMOID);
    router.selection_bias = bias;
    const Choice choice   = choose(router, LOGITS, 2);
    require(choice.experts == std::vector<int>{ 2, 1 }, "the biased one comes first");
    require(near(choice.weights[0], gated(PYORCH_GATING_SIGMOID, 2)), "its weight is without the bias");
}

static void only_the_best_groups_count() {
    Router router        = router_with(PYORCH_GATING_SIGMOID);
    router.n_groups      = 3; // { 0.3, 1.7 }, { -0.4, 0.9 }, { -2.0, 1.1 }
    router.n_groups_used = 1;
    Choice choice        = choose(router, LOGITS, 6);
    require(choice.experts == std::vector<int>{ 1, 0 }, "no expert of another group is named");
    router.n_groups_used = 2;
    choice               = choose(router, LOGITS, 6);
    require(choice.experts == std::vector<int>{ 1, 3, 0, 2 }, "the third group is worth less than the second");
}

static void what_no_model_holds_is_forgotten() {
    Routers   routers(2);
    Router    router = router_with(PYORCH_GATING_SOFTMAX);
    const int model = 0, other = 0;
    routers.set(0, router, &model);
    routers.set(1, {}, &other, "layer 1 is odd");
    require(routers.all()[0] && !routers.all()[1] && routers.unknown() == "layer 1 is odd", "both are kept");
    routers.forget(&model);
    require(!routers.all()[0] && routers.unknown() == "layer 1 is odd", "only those of the model that goes");
    routers.forget(&other);
    require(routers.unknown().empty(), "nothing is known of what is gone");
}

int main() {
    weights_are_those_that_the_model_makes();
    a_selection_bias_selects_and_does_not_weigh();
    only_the_best_groups_count();
    what_no_model_holds_is_forgotten();
    return 0;
}
