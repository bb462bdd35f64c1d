// What speculation puts in the place of a router's choice, and what it counts.

#include "routing/speculation.h"

#include <cstdio>
#include <cstdlib>

using namespace pyorch;

static void require(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

int main() {
    constexpr int n_used            = 2;
    const int32_t requested[n_used] = { 1, 3 };
    const float   given[n_used]     = { 0.7f, 0.3f };
    int32_t       experts[n_used]   = { 1, 3 };
    float         weights[n_used]   = { 0.7f, 0.3f };

    RoutedBatch batch       = {};
    batch.n_tokens          = 1;
    batch.n_expert          = 5;
    batch.n_used            = n_used;
    batch.requested         = requested;
    batch.requested_weights = given;
    batch.experts           = experts;
    batch.weights           = weights;

    const Forecast forecast = { 1, 1, 0, { 1, 0, 4 }, { 0.4f, 0.5f, 0, 0, 0.1f }, { 0.6f, 0.4f } };
    Speculation    speculation;
    require(speculation.apply(batch, { forecast }), "a complete forecast is taken");
    require(experts[0] == 1 && experts[1] == 0, "the forecast experts are computed");
    require(weights[0] == 0.6f && weights[1] == 0.4f, "with the weights that their router gives them");
    require(requested[1] == 3, "what the router asked for stays");
    const pyorch_speculation_counts counts = speculation.counts();
    require(counts.tokens == 1 && counts.slots == 2 && counts.right == 1, "one was what the router asked for");

    // Where absent experts are treated, forecasts only say what is there.
    experts[0] = 1;
    experts[1] = 3;
    weights[0] = 0.7f;
    require(speculation.mark(batch, { forecast }), "a complete forecast is marked");
    require(batch.guessed == std::vector<uint8_t>({ 1, 1, 0, 0, 0 }), "of it, as many experts as are used");
    require(experts[1] == 3 && weights[0] == 0.7f, "the router's choice stands");
    require(speculation.counts().slots == 3 && speculation.counts().right == 2,
        "one slot is computed as forecast, and right");
    require(!speculation.mark(batch, {}) && batch.guessed.empty(), "where nothing is forecast, nothing is marked");

    // Of a first layer nothing is forecast, a forecast of fewer tokens is not taken for another's, and one without
    // weights cannot be computed with.
    Forecast bare = forecast;
    bare.weights.clear();
    for (const auto & forecasts :
        { std::vector<Forecast>(), std::vector<Forecast>{ forecast, forecast }, std::vector<Forecast>{ bare } }) {
        experts[0] = 4;
        require(!speculation.apply(batch, forecasts), "not taken");
        require(experts[0] == 4 && speculation.counts().slots == 3, "what was there stays");
    }
    return 0;
}
