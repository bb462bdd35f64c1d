// Speculative execution (Speculating Experts, section 4): a layer computes with the experts and weights that were
// forecast for it one layer earlier, in place of its router's choice. Lossy.
//
// If absent experts are treated (routing/substitution.h), forecasts only decide what is read: the router's choice and
// its weights stay, and an expert that is neither forecast nor resident is treated as those settings say.

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

    // Replaces the computed experts by forecasts and returns true. forecasts: of this layer, one for each token in
    // order, with weights; otherwise, as in the first layer, it replaces nothing.
    bool apply(RoutedBatch & batch, const std::vector<Forecast> & forecasts);

    // Marks the forecast experts in batch.guessed under the same conditions, and replaces nothing.
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
