// The prefetch controller under synthetic token times: prefetch is on where it gains, and off where it loses.

#include "prediction/prefetch_controller.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

// Tokens that take so many ms with prefetch and without. Times of single tokens vary by a third, as real ones do.
struct Regime {
    int    n_tokens;
    double ms_on;
    double ms_off;
};

// Of the tokens of each regime, those that had prefetch on.
static std::vector<double> shares(const std::vector<Regime> & regimes) {
    pyorch::PrefetchController controller;
    std::mt19937 rng(7);
    std::normal_distribution<double> noise(1, 0.33);
    std::vector<double> result;
    for (const Regime & regime : regimes) {
        int on = 0;
        for (int t = 0; t < regime.n_tokens; ++t) {
            on += controller.on();
            const double ms = controller.on() ? regime.ms_on : regime.ms_off;
            controller.token(ms / 1000 * std::max(0.2, noise(rng)));
            if (t % 500 == 250) {
                controller.token(60); // a pause between two requests
            }
        }
        result.push_back((double) on / regime.n_tokens);
    }
    return result;
}

static int n_failed = 0;

static void require(bool ok, const char * claim, const std::vector<double> & found) {
    if (!ok) {
        fprintf(stderr, "%s: prefetch was on for", claim);
        for (double share : found) {
            fprintf(stderr, " %.3f", share);
        }
        fprintf(stderr, " of the tokens\n");
        ++n_failed;
    }
}

int main() {
    const Regime gains = { 20000, 40, 60 }, loses = { 20000, 60, 40 };
    auto found = shares({ gains });
    require(found[0] > 0.95, "prefetch stays on while it gains", found);
    found = shares({ loses });
    require(found[0] < 0.05, "prefetch goes off where it loses", found);

    const Regime fast_disk = { 20000, 30, 20 }, slow_disk = { 20000, 60, 90 };
    found = shares({ fast_disk, slow_disk });
    require(found[0] < 0.1 && found[1] > 0.9, "prefetch goes on when the disk becomes slow", found);
    found = shares({ slow_disk, fast_disk });
    require(found[0] > 0.9 && found[1] < 0.1, "prefetch goes off when the disk becomes fast", found);

    found = shares({ { 50000, 41, 40 } });
    require(found[0] * 1 / 40 < 0.01, "a small loss costs less than a percent", found);
    return n_failed ? 1 : 0;
}
