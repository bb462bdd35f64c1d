// Predictions that gain are made, and predictions that lose are made in trials only.

#include "prediction/prediction_trial.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

static int n_failed = 0;

static void require(bool ok, const char * claim, const std::vector<double> & found) {
    if (!ok) {
        fprintf(stderr, "%s: does not hold; shares:", claim);
        for (double share : found) {
            fprintf(stderr, " %.3f", share);
        }
        fprintf(stderr, "\n");
        ++n_failed;
    }
}

// Ubatches that take 100 ms, and with predictions so many times as long; each by chance up to a quarter more or less,
// and what falls with time is what a cold start adds. Of chance, that share is bytes that were absent, 1 a nanosecond.
// Of n ubatches from the first, the share with predictions.
static double tried(pyorch::PredictionTrial & trial, int n, double ratio, uint32_t seed, double of_absent = 0) {
    std::mt19937 chance(seed);
    const auto   next = [&] { return (double) chance() / 4294967296.0 - 0.5; };
    int          n_on = 0;
    for (int u = 0; u < n; ++u) {
        const double noise = 0.05 * next(), usual = 0.1 + 0.1 / (1 + u), absent = 0.05 * (1 + next()) * of_absent;
        n_on += trial.on();
        const double seconds = (usual + (1 - of_absent) * noise) * (trial.on() ? ratio : 1) + absent;
        trial.add(seconds, 1e9 * absent);
    }
    return (double) n_on / n;
}

// Of 200 trials of 300 ubatches each, the share that ends with the sooner, which is kept from ubatch 208 on at the
// latest.
static double right(double ratio, double of_absent) {
    int n_right = 0;
    for (uint32_t seed = 1; seed <= 200; ++seed) {
        pyorch::PredictionTrial trial;
        tried(trial, 300, ratio, seed, of_absent);
        n_right += trial.on() == (ratio < 1);
    }
    return n_right / 200.0;
}

static void what_is_absent_is_no_gain_and_no_loss() {
    for (const double ratio : { 0.98, 1.02 }) {
        const double found = right(ratio, 0.9), blind = right(ratio, 0);
        require(found > 0.95, "where chance is in what was absent, a fiftieth is told", { ratio, found, blind });
    }
}

static void the_sooner_is_kept() {
    double sooner = 1, later = 0, mended = 1;
    for (uint32_t seed = 1; seed <= 20; ++seed) {
        pyorch::PredictionTrial gains, loses;
        sooner = std::min(sooner, tried(gains, 2000, 0.85, seed));
        later  = std::max(later, tried(loses, 2000, 1.15, seed));
        mended = std::min(mended, tried(loses, 20000, 0.85, seed));
    }
    double little = 0;
    for (uint32_t seed = 1; seed <= 100; ++seed) {
        pyorch::PredictionTrial trial;
        little += tried(trial, 200, 1.06, seed) / 100;
    }
    require(little < 0.3, "what seems to lose a little is not tried to the end", { little });
    require(sooner > 0.9, "predictions that gain are made but in trials", { sooner });
    require(later < 0.1, "predictions that lose are made in trials only", { later });
    require(mended > 0.5, "they are made again where they have come to gain", { mended });

    // Who asks pauses after each second ubatch: never is there a block, and predictions are made.
    pyorch::PredictionTrial pauses;
    int                     n_off = 0;
    for (int u = 0; u < 1000; ++u) {
        n_off += !pauses.on();
        pauses.add(u % 2 ? 0.1 : 0, 0);
    }
    require(n_off == 0, "pauses are no trial", { (double) n_off });
}

// A trial's share of the ubatches that are predicted, and whether the last one was: each of n takes that long, or so
// many times as long where it is predicted; absent bytes and a pause are said by number.
template <typename Absent, typename Seconds>
static double share_on(int n, double ratio, Absent absent, Seconds seconds, bool * last = nullptr) {
    pyorch::PredictionTrial trial;
    int                     n_on = 0;
    for (int u = 0; u < n; ++u) {
        const bool on = trial.on();
        n_on += on;
        trial.add(seconds(u) * (on ? ratio : 1), absent(u, on));
        if (last) {
            *last = on;
        }
    }
    return (double) n_on / n;
}

static void trials_end_and_come_again() {
    std::mt19937 chance(7);
    const auto   noise  = [&] { return 0.9 + 0.2 * (double) chance() / 4294967296.0; };
    const auto   none   = [](int, bool) { return 0.0; };
    const auto   steady = [&](int) { return 0.1 * noise(); };

    // Where both take as long, a trial ends with its last pair all the same: what follows is of one kind.
    int n_changes = 0;
    for (int round = 0; round < 20; ++round) {
        pyorch::PredictionTrial trial;
        bool                    before = true;
        for (int u = 0; u < 16 + 2 * 24 * 4 + 200; ++u) {
            n_changes += u > 16 + 2 * 24 * 4 && trial.on() != before;
            before = trial.on();
            trial.add(steady(u), 0);
        }
    }
    require(n_changes == 0, "a trial ends with its last pair", { (double) n_changes });

    double share = share_on(100000, 0.8, none, steady);
    require(share > 0.995, "where trials end alike they come ever more seldom", { share });
    bool last = true;
    share     = share_on(4000, 1.3, none, [&](int u) { return u % 8 ? steady(u) : 0; }, &last);
    require(share < 0.2 && !last, "requests of few tokens are tried, too", { share });
    share = share_on(4000, 1.3, none, [&](int u) { return (u < 30 ? 1 : 20) * steady(u); }, &last);
    require(share < 0.1 && !last, "what has become slow for good is no pause", { share });
    share = share_on(4000, 1.3, none, [&](int u) { return (u % 50 ? 1 : 100) * steady(u); }, &last);
    require(share < 0.1 && !last, "a pause is in no pair", { share });
    share = share_on(400, 1.1, [](int, bool on) { return on ? 1e6 : 2e6; }, steady, &last);
    require(!last, "that less is absent with predictions is no reason why they take longer", { share });
    share = share_on(400, 1.05, none, [&](int u) { return (0.1 + 0.001 * u) * noise() / 0.9; }, &last);
    require(!last, "what grows with time is of neither side", { share });
}

int main() {
    trials_end_and_come_again();
    the_sooner_is_kept();
    what_is_absent_is_no_gain_and_no_loss();
    return n_failed ? 1 : 0;
}
