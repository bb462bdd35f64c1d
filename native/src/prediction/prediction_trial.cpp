#include "prediction/prediction_trial.h"

#include <algorithm>
#include <cmath>

namespace pyorch {

void PredictionTrial::add(double seconds, double absent) {
    if (!trying()) {
        --left;
        return;
    }
    // A pause of the caller is not decoding time: the block starts again.
    if (seconds <= 0 || (usual > 0 && seconds > 8 * usual)) {
        n     = 0;
        sum   = {};
        usual = 0; // unless all are this slow from now on
        return;
    }
    sum.seconds += seconds;
    sum.absent += absent;
    if (++n < BLOCK) {
        return;
    }
    usual = sum.seconds / BLOCK;
    if (block % 2 == 0) {
        first = sum;
    } else if (on_in(block)) {
        add_pair(sum, first);
    } else {
        add_pair(first, sum);
    }
    ++block;
    n   = 0;
    sum = {};
}

void PredictionTrial::add_pair(const Block & with, const Block & without) {
    const double longer = std::log(without.seconds / with.seconds);
    const double more   = (without.absent - with.absent) / (without.seconds + with.seconds);
    const double off = longer - pairs.longer, off_more = more - pairs.more;
    ++pairs.n;
    pairs.longer += off / pairs.n;
    pairs.more += off_more / pairs.n;
    pairs.longer_longer += off * (longer - pairs.longer);
    pairs.longer_more += off * (more - pairs.more);
    pairs.more_more += off_more * (more - pairs.more);
    if (pairs.n < FEWEST_PAIRS) {
        return;
    }
    // The line of least squares; more absent bytes cannot make decoding faster.
    const double more_more = std::max(pairs.more_more, 1e-300);
    const double slope     = std::max(pairs.longer_more / more_more, 0.0);
    const double gain      = pairs.longer - slope * pairs.more;
    const double rest      = pairs.longer_longer - slope * (2 * pairs.longer_more - slope * pairs.more_more);
    const double of_line   = slope > 0 ? pairs.more * pairs.more / more_more : 0;
    const int    free      = pairs.n - 2;
    const double error     = std::sqrt(std::max(rest, 0.0) / free * (1.0 / pairs.n + of_line));
    // Wider for fewer pairs, approximately the quantiles of Student's distribution.
    const bool told = std::fabs(gain) >= (2 + 6.0 / (free + 1)) * error;
    const bool vain = gain + error < 0; // a trial costs half of the loss that it finds
    if (!told && !vain && pairs.n < MOST_PAIRS) {
        return;
    }
    held  = kept == (gain >= 0) ? std::min(2 * held, MOST_HELD) : HELD;
    kept  = gain >= 0;
    left  = held;
    block = -1; // the next ubatch starts the next block
    pairs = {};
}

} // namespace pyorch
