#include "prediction/prediction_balance.h"

#include <algorithm>
#include <cmath>

namespace pyorch {

static constexpr double BLEND       = 1.0 / 32; // of an ubatch in a mean
static constexpr double LEAST_YIELD = 0.01;

// Where nothing is predicted nothing is learnt: what was learnt is forgotten, and predictions are tried for some tokens
// of thousands.
static constexpr double FORGET        = 1.0 / 8192;
static constexpr double UNKNOWN_YIELD = 0.2;

void PredictionBalance::add(double absent_, double saved, double spent, bool predicted) {
    if (predicted) {
        cost += BLEND * (spent - cost);
        yield += absent_ > 0 ? BLEND * (saved / absent_ - yield) : 0;
    } else if (!pays()) {
        yield += FORGET * (UNKNOWN_YIELD - yield);
    }
    absent = absent < 0 ? absent_ : absent + BLEND * (absent_ - absent);
    worth  = absent * std::max(yield, LEAST_YIELD);
}

void PredictionTrial::add(double seconds) {
    if (!trying()) {
        --left;
        return;
    }
    // A pause of who asks is nobody's: pairs begin again.
    if (seconds <= 0 || (usual > 0 && seconds > 8 * usual)) {
        block = 0;
        n     = 0;
        sum   = 0;
        return;
    }
    sum += seconds;
    if (++n < BLOCK) {
        return;
    }
    usual = sum / BLOCK;
    if (block % 2 == 0) {
        first = sum;
    } else if (on_in(block)) {
        add_pair(sum, first);
    } else {
        add_pair(first, sum);
    }
    ++block;
    n   = 0;
    sum = 0;
}

void PredictionTrial::add_pair(double with, double without) {
    const double gain = std::log(without / with), off = gain - mean;
    mean += off / ++n_pairs;
    squares += off * (gain - mean);
    // The wider, the fewer: about the quantiles of Student's distribution.
    const double error = n_pairs < 3 ? INFINITY : std::sqrt(squares / (n_pairs - 1) / n_pairs);
    const bool   told  = std::fabs(mean) >= (2 + 6.0 / n_pairs) * error;
    // What is likelier to lose than to gain is tried no further: a trial costs half of what it finds.
    const bool vain = n_pairs >= FEWEST_IN_VAIN && mean + error < 0;
    if (!told && !vain && n_pairs < MOST_PAIRS) {
        return;
    }
    held    = kept == (mean >= 0) ? std::min(2 * held, MOST_HELD) : HELD;
    kept    = mean >= 0;
    left    = held;
    block   = -1; // the next one begins with it
    n_pairs = 0;
    mean    = 0;
    squares = 0;
}

} // namespace pyorch
