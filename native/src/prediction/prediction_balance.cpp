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

} // namespace pyorch
