// Predictions are made where what they save is worth their time, and only there.

#include "prediction/prediction_balance.h"

#include <cstdio>
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
    for (const Regime & it : regimes) {
        int n = 0;
        for (int u = 0; u < it.n_ubatches; ++u) {
            const bool on = balance.pays();
            n += on;
            balance.add(it.ms_absent / 1000, on ? it.share_saved * it.ms_absent / 1000 : 0, on ? it.ms_spent / 1000 : 0);
        }
        found.push_back((double) n / it.n_ubatches);
    }
    return found;
}

static int n_failed = 0;

static void require(bool ok, const char * claim, const std::vector<double> & found) {
    if (!ok) {
        fprintf(stderr, "%s: was predicted for", claim);
        for (double share : found) {
            fprintf(stderr, " %.3f", share);
        }
        fprintf(stderr, " of the ubatches\n");
        ++n_failed;
    }
}

int main() {
    const Regime gains = { 5000, 60, 0.2, 0.8 }, resident = { 5000, 0, 0, 0.8 }, tiny = { 5000, 0.1, 0.5, 0.8 };
    auto found = shares({ gains });
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
