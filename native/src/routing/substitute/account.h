// The account of a token's slots: the computed expert of each, its weight, and the counts.

#pragma once

#include "routing/ghosts.h"
#include "routing/routed_batch.h"

#include <vector>

namespace pyorch {

class Account {
public:
    // Adds to counts. ghosts: null for none.
    Account(const pyorch_substitution & settings, const GhostLayer * ghosts, RoutedBatch & batch,
        const uint8_t * resident, pyorch_substitution_counts & counts);

    // Begins a token. Returns the number of its slots with absent experts.
    int begin(int token);

    // Its experts and weights at the beginning.
    const int32_t * experts() const { return before.data(); }
    const float *   weights() const { return batch.weights + first; }

    int n_changed() const { return n_substituted + n_dropped + n_ghosts; }

    // Slots that earlier layers changed.
    int n_earlier() const { return batch.changed ? batch.changed[first / batch.n_used] : 0; }

    // Replaces an absent expert of a slot by this one, with this rank in its buddy list.
    void substitute(int slot, int expert, int rank);

    // Without a buddy: its ghost computes, or it is omitted or waited for, as on_miss says.
    void find_no_buddy(int slot);

    // Ends the token, when all slots are treated.
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
