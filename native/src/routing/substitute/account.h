// What became of a token's slots: the expert that each computes with, its weight, and what is counted of it.

#pragma once

#include "routing/ghosts.h"
#include "routing/routed_batch.h"

#include <vector>

namespace pyorch {

class Account {
public:
    // Counts into counts. ghosts: null where there are none.
    Account(const pyorch_substitution & settings, const GhostLayer * ghosts, RoutedBatch & batch,
        const uint8_t * resident, pyorch_substitution_counts & counts);

    // A token comes. Returns how many of its slots have absent experts.
    int begin(int token);

    // Its experts and weights, as they were when it came.
    const int32_t * experts() const { return before.data(); }
    const float *   weights() const { return batch.weights + first; }

    int n_changed() const { return n_substituted + n_dropped + n_ghosts; }

    // Slots that the layers before changed.
    int n_earlier() const { return batch.changed ? batch.changed[first / batch.n_used] : 0; }

    // An absent expert's slot gets this one, of that rank in its buddy list.
    void substitute(int slot, int expert, int rank);

    // It gets none: its ghost computes, or it is left out, or waited for, as on_miss says.
    void find_no_buddy(int slot);

    // All of them are treated.
    void end();

private:
    const pyorch_substitution &  settings;
    const GhostLayer *           ghosts;
    RoutedBatch &                batch;
    const uint8_t *              resident;
    pyorch_substitution_counts & counts;

    size_t               first = 0; // slot of the batch
    std::vector<int32_t> before;
    std::vector<uint8_t> dropped;
    int                  n_substituted = 0;
    int                  n_dropped     = 0;
    int                  n_ghosts      = 0;

    void name_dropped();
    void reweigh();
};

} // namespace pyorch
