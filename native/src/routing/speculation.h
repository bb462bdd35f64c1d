// Speculative execution (Speculating Experts, section 4): a layer computes with the experts and weights that were
// forecast for it one layer earlier, in place of its router's. Lossy.
//
// Where absent experts are treated (routing/substitution.h), forecasts only say which ones are read: the router's
// choice and its weights stand, and what was not forecast and is not there is treated as its settings say.

#pragma once

#include "base/mutex.h"
#include "prediction/prediction.h"
#include "routing/routed_batch.h"

#include <atomic>
#include <vector>

namespace pyorch {

class Speculation {
public:
    void             set(pyorch_speculate mode) { chosen = mode; }
    pyorch_speculate mode() const { return chosen; }

    // Whether a ubatch is computed with forecasts. decode: one token of each sequence.
    bool active(bool decode) const {
        return chosen == PYORCH_SPECULATE_ALL || (chosen == PYORCH_SPECULATE_DECODE && decode);
    }

    // Puts forecasts in the place of what is computed. forecasts: of this layer, one for each token in their order,
    // with weights; otherwise nothing is replaced, which is true of the first layer too. Whether it was.
    bool apply(RoutedBatch & batch, const std::vector<Forecast> & forecasts);

    // Marks them in batch.guessed, under the same conditions, and replaces nothing.
    bool mark(RoutedBatch & batch, const std::vector<Forecast> & forecasts);

    pyorch_speculation_counts counts() const;
    void                      reset_counts();

private:
    std::atomic<pyorch_speculate> chosen{ PYORCH_SPECULATE_NONE };
    mutable Mutex                 mutex;
    pyorch_speculation_counts     counted GUARDED_BY(mutex) = {};

    bool count(const RoutedBatch & batch, const std::vector<Forecast> & forecasts, bool executed);
};

} // namespace pyorch
