// Which expert stands in for an absent one: a buddy by priority (BuddyMoE, eq. 3), or what baselines take.

#pragma once

#include "pyorch.h"
#include "routing/routed_batch.h"

#include <cstdint>
#include <vector>

namespace pyorch {

// Peers of each expert, most similar first.
struct BuddyLists {
    int                  k_max = 0;
    std::vector<int32_t> ids;   // [n_expert][k_max], -1 after the last
    std::vector<float>   q;     // [n_expert][k_max] eq. 4
    std::vector<float>   scale; // [n_expert][k_max] factor of the buddy's output, nan: unknown. May be empty
    std::vector<float>
        error; // [n_expert][k_max] what is left then of the squared output, 1: all. nan: unknown. May be empty

    // Of an array above, for the buddy of that rank; nan where nobody knows.
    float at(const std::vector<float> & values, int expert, int rank) const;
};

// What a mask of residents says of an expert.
enum : uint8_t {
    ABSENT  = 0,
    HERE    = 1,
    AT_PEER = 2, // another server computes it, a hop away
};

// Chooses substitutes for the tokens of a batch, one after the other.
class Chooser {
public:
    Chooser(const pyorch_substitution & settings, const BuddyLists & lists, const RoutedBatch & batch,
        const uint8_t * resident);

    // A token comes, with these experts [n_used].
    void begin(int token, const int32_t * experts);

    // The substitute of an absent expert, and its rank in the list; -1 if there is none.
    int find(int expert, int & rank) const;

    // It stands in for an expert of the token.
    void take(int substitute);

private:
    const pyorch_substitution & settings;
    const BuddyLists &          lists;
    const RoutedBatch &         batch;
    const uint8_t *             resident;

    int                  t = 0;
    std::vector<uint8_t> taken;  // by this token
    std::vector<int>     chosen; // how often, in this batch

    bool   free(int expert) const { return resident[expert] && !taken[expert]; }
    int    choose_buddy(int expert, int & rank) const;
    double priority_of(int buddy, double q) const;
    float  score(int expert) const;
    int    choose_ranked(int expert) const;
    int    choose_random(int expert) const;
};

} // namespace pyorch
