// The choice of a replacement for an absent expert: a buddy by priority (BuddyMoE, eq. 3), or a baseline's choice.

#pragma once

#include "pyorch.h"
#include "routing/routed_batch.h"

#include <cstdint>
#include <vector>

namespace pyorch {

// Peers of each expert, most similar first.
struct BuddyLists {
    int                  k_max = 0;
    std::vector<int32_t> ids; // [n_expert][k_max], -1 after the last
    std::vector<float>   q;   // [n_expert][k_max] (eq. 4)
};

// Chooses replacements for the tokens of a batch, one after the other.
class Chooser {
public:
    Chooser(const pyorch_substitution & settings, const BuddyLists & lists, const RoutedBatch & batch,
        const uint8_t * resident);

    // Begins a token with these experts [n_used].
    void begin(int token, const int32_t * experts);

    // Returns the replacement of an absent expert, and its rank in the list; -1 if there is none.
    int find(int expert, int & rank) const;

    // Records that it replaces an expert of the token.
    void take(int substitute) {
        taken[substitute] = 1;
        ++n_chosen[substitute];
    }

private:
    const pyorch_substitution & settings;
    const BuddyLists &          lists;
    const RoutedBatch &         batch;
    const uint8_t *             resident;

    int                  t = 0;
    std::vector<uint8_t> taken;    // by this token
    std::vector<int>     n_chosen; // by tokens of this batch
    double               low  = 0; // smallest of the token's logits, with eta
    double               span = 0; // from there to the largest

    bool   free(int expert) const { return resident[expert] && !taken[expert]; }
    double priority(int buddy, double q) const;
    int    choose_buddy(int expert, int & rank) const;
    float  score(int expert) const;
    int    choose_ranked(int expert) const;
    int    choose_random(int expert) const;
};

} // namespace pyorch
