#include "prediction/prefetch_controller.h"

#include <algorithm>

namespace pyorch {

static constexpr int    TRIAL     = 32;   // tokens: times of single tokens differ a lot
static constexpr int    SETTLE    = 2;    // tokens that still feel the mode before
static constexpr int    SHORT_RUN = 256;
static constexpr int    LONG_RUN  = 2048;
static constexpr double PAUSE     = 10;   // times the mean
static constexpr double CHANGED   = 1.3;  // the winner's times are not what they were
static constexpr double BLEND     = 0.5;  // of a new phase in the mean

void PrefetchController::begin(Mode next, bool as_trial) {
    mode  = next;
    trial = as_trial;
    seen  = 0;
    times[mode].sum = 0;
    times[mode].n   = 0;
}

void PrefetchController::close_phase() {
    Times & t = times[mode];
    if (t.n > 0) {
        const double mean = t.sum / t.n;
        t.mean = t.mean > 0 ? t.mean + BLEND * (mean - t.mean) : mean;
    }
}

void PrefetchController::token(double seconds) {
    Times & t = times[mode];
    if (t.mean > 0 && seconds > PAUSE * t.mean) {
        return;
    }
    if (++seen > SETTLE) {
        t.sum += seconds;
        ++t.n;
    }
    const Mode other = mode == ON ? OFF : ON;
    if (trial) {
        if (t.n < TRIAL) {
            return;
        }
        close_phase();
        if (times[other].mean == 0) {
            begin(other, true);
            return;
        }
        const Mode winner = times[ON].mean <= times[OFF].mean ? ON : OFF;
        const Mode loser  = winner == ON ? OFF : ON;
        const bool clear  = times[loser].mean > 1.05 * times[winner].mean;
        run = clear ? std::min(LONG_RUN, std::max(SHORT_RUN, 2 * run)) : SHORT_RUN;
        begin(winner, false);
        return;
    }
    if (t.n == TRIAL) {
        const double mean    = t.sum / t.n;
        const bool   changed = t.mean > 0 && (mean > CHANGED * t.mean || t.mean > CHANGED * mean);
        close_phase();
        t.sum = 0;
        t.n   = 0;
        if (changed) {
            // What is known of either mode is of another time.
            t.mean            = mean;
            times[other].mean = 0;
            run               = 0;
            begin(other, true);
            return;
        }
    }
    if (seen >= run) {
        begin(other, true);
    }
}

} // namespace pyorch
