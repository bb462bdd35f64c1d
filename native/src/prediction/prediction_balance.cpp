#include "prediction/prediction_balance.h"

#include <algorithm>

namespace pyorch {

static constexpr double BLEND       = 1.0 / 32; // of an ubatch in a mean
static constexpr double LEAST_YIELD = 0.01;

// Where nothing is predicted nothing is learnt: what was learnt is forgotten, and predictions are tried for some tokens
// of thousands.
static constexpr double FORGET        = 1.0 / 8192;
static constexpr double UNKNOWN_YIELD = 0.2;

void PredictionBalance::add(double absent_, double saved, double spent) {
    if (pays()) {
        cost += BLEND * (spent - cost);
        yield += absent_ > 0 ? BLEND * (saved / absent_ - yield) : 0;
    } else {
        yield += FORGET * (UNKNOWN_YIELD - yield);
    }
    absent = absent < 0 ? absent_ : absent + BLEND * (absent_ - absent);
    worth  = absent * std::max(yield, LEAST_YIELD);
}

// A block is long beside what one of the other kind leaves behind, of which its first ubatches are not counted.
static constexpr int BLOCK = 12, SETTLING = 2;

// Blocks of the favourite for one of the other: while it is not clear which is sooner, and then.
static constexpr int OPEN = 3, CLEAR = 15;

static constexpr double MEMORY = 512; // ubatches, of whichever kind
static constexpr double PAUSE  = 5;   // times as long as usual: nobody asked for a token meanwhile

void GuessTrial::add(double seconds) {
    Arm & a = arms[arm];
    if (at++ >= SETTLING && (a.n == 0 || seconds < PAUSE * std::exp(a.mean()))) {
        const double value = std::log(std::max(seconds, 1e-9));
        for (Arm & each : arms) {
            each.n -= each.n / MEMORY;
            each.sum -= each.sum / MEMORY;
            each.squares -= each.squares / MEMORY;
        }
        a.n += 1;
        a.sum += value;
        a.squares += value * value;
    }
    if (at == BLOCK) {
        at  = 0;
        arm = next_arm();
    }
}

int GuessTrial::next_arm() {
    const Arm &on = arms[ON], &off = arms[OFF];
    bool       clear = false;
    if (on.n > 0 && off.n > 0) {
        const double gain  = off.mean() - on.mean();
        const double error = std::sqrt(on.variance() / on.n + off.variance() / off.n);
        clear              = std::abs(gain) > 2 * error;
        // What guesses are counted to save stands until the clock says otherwise.
        favourite = gain < -error ? OFF : ON;
    }
    n_blocks += arm == favourite;
    if (n_blocks < (clear ? CLEAR : OPEN)) {
        return favourite;
    }
    n_blocks = 0;
    return favourite == ON ? OFF : ON;
}

} // namespace pyorch
