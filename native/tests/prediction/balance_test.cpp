// Predictions are made where what they save is worth their time, and only there; and never for more than an allowance.

#include "prediction/prediction_balance.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

// Ubatches in which layers wait for reads of so many ms where nothing is predicted; predictions save a share of that,
// and take a processor so many ms.
struct Regime {
    int    n_ubatches;
    double ms_absent;
    double share_saved;
    double ms_spent;
};

// Of the ubatches of each regime, those in which was predicted.
static std::vector<double> shares(const std::vector<Regime> & regimes) {
    pyorch::PredictionBalance balance;
    std::vector<double>       found;
    for (const Regime & regime : regimes) {
        int n = 0;
        for (int u = 0; u < regime.n_ubatches; ++u) {
            const bool on = balance.pays();
            n += on;
            balance.add(regime.ms_absent / 1000, on ? regime.share_saved * regime.ms_absent / 1000 : 0,
                on ? regime.ms_spent / 1000 : 0, on);
        }
        found.push_back((double) n / regime.n_ubatches);
    }
    return found;
}

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

struct Allowed {
    double share;       // of the time that passed, what predictions took
    double predicted;   // of the layers
    double far;         // of the layers, those predicted for more than one layer ahead
    int    most_missed; // layers one after another without a prediction
};

// Layers that take so many us each, predicted one layer ahead in so many us, and farther ahead in twice that.
static Allowed allowed(double us_layer, double us_prediction) {
    pyorch::PredictionAllowance allowance;
    Allowed                     allowed  = { 0, 0, 0, 0 };
    const int                   n_layers = 100000;
    double                      now      = 0;
    for (int layer = 0, missed = 0; layer < n_layers; ++layer) {
        now += 1e-6 * us_layer;
        const int    reach = allowance.reach(now);
        const double took  = 1e-6 * us_prediction * (reach == 0 ? 0 : reach == 1 ? 1 : 2);
        allowance.spend(took);
        allowed.share += took;
        allowed.predicted += (double) (reach > 0) / n_layers;
        allowed.far += (double) (reach > 1) / n_layers;
        missed              = reach > 0 ? 0 : missed + 1;
        allowed.most_missed = std::max(allowed.most_missed, missed);
    }
    allowed.share /= now;
    return allowed;
}

static void the_allowance_is_kept() {
    const Allowed cheap = allowed(2000, 5), dear = allowed(2000, 30), too_dear = allowed(2000, 120);
    require(cheap.far > 0.999, "what costs a two-hundredth is predicted as far ahead as wanted", { cheap.far });
    require(dear.predicted > 0.999 && dear.far < 0.5 && dear.far > 0.2, "where time is short the next layer goes first",
        { dear.predicted, dear.far });
    require(too_dear.predicted > 0.3 && too_dear.predicted < 0.4 && too_dear.most_missed <= 3,
        "of layers that cost three times the allowance every third is predicted",
        { too_dear.predicted, (double) too_dear.most_missed });
    for (const Allowed & allowed : { cheap, dear, too_dear }) {
        require(allowed.share < 0.0201, "predictions take a fiftieth of the time at most", { allowed.share });
    }

    pyorch::PredictionAllowance allowance;
    allowance.spend(1); // by far too long
    require(allowance.reach(10) == 0 && allowance.reach(51) > 0, "what took too long is made up for", {});
    allowance = {};
    allowance.reach(1e6);
    allowance.spend(0.003);
    require(allowance.reach(1e6) == 0, "an hour's pause is no allowance for what comes then", {});
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
    the_allowance_is_kept();
    trials_end_and_come_again();
    the_sooner_is_kept();
    what_is_absent_is_no_gain_and_no_loss();

    const Regime gains = { 5000, 60, 0.2, 0.8 }, resident = { 5000, 0, 0, 0.8 }, tiny = { 5000, 0.1, 0.5, 0.8 };
    auto         found = shares({ gains });
    require(found[0] > 0.99, "predictions that save more than they take are made, and at once", found);
    found = shares({ resident });
    require(found[0] == 0, "where nothing is absent nothing is predicted", found);
    found = shares({ tiny });
    require(found[0] < 0.01, "reads that take next to nothing are not predicted", found);

    // Guesses are never read, or never right: it takes some ubatches to know.
    found = shares({ { 50000, 20, 0, 0.8 } });
    require(found[0] < 0.02, "predictions that save nothing end", found);
    found = shares({ { 5000, 200, 0, 0.8 } });
    require(found[0] > 0.99, "predictions that take next to nothing beside the reads go on", found);

    found = shares({ resident, gains, resident, gains });
    require(found[1] > 0.99 && found[2] < 0.1 && found[3] > 0.99, "they begin and end as reads do", found);
    return n_failed ? 1 : 0;
}
