// In which order the absent experts of a token are treated, by weight or by what is expected to be missed, and which of
// its slots stay as the router chose them.

#pragma once

#include "routing/ghosts.h"
#include "routing/substitute/choose.h"

#include <cmath>
#include <limits>
#include <vector>

namespace pyorch {

// What is expected to be missed of a slot's squared output, as a share of the layer's: by this PYORCH_MISS_AUTO chooses
// between a buddy, a ghost and leaving out.
class Errors {
public:
    // ghosts: null where there are none; then nothing is automatic.
    Errors(const pyorch_substitution & settings, const BuddyLists & lists, const GhostLayer * ghosts) :
            automatic(settings.on_miss == PYORCH_MISS_AUTO && ghosts),
            fitted(settings.mode == PYORCH_SUBSTITUTE_BUDDIES && settings.weight == PYORCH_WEIGHT_FITTED), lists(lists),
            ghosts(ghosts) {}

    const bool automatic; // else nothing below is asked

    // With its ghost, or left out where it has none. share: of the token's weights.
    double without_buddy(int expert, double share) const {
        return share * share * (ghosts->has(expert) ? ghosts->error_with(expert) : ghosts->error_without(expert));
    }

    // With the buddy of that rank; infinite where nobody knows.
    double with_buddy(int expert, int rank, double share) const {
        const float left = fitted ? lists.at(lists.error, expert, rank) : NAN;
        return std::isnan(left) ? std::numeric_limits<double>::infinity() :
                                  share * share * ghosts->error_without(expert) * left;
    }

private:
    const bool         fitted;
    const BuddyLists & lists;
    const GhostLayer * ghosts;
};

class SlotOrder {
public:
    SlotOrder(const pyorch_substitution & settings, const Errors & errors, int n_used);

    // Of a token whose slots have these experts and weights, [n_used] each: all slots, the first to be treated first.
    const std::vector<int> & of(const int32_t * experts, const float * weights);

    // Among the token's heaviest: it is never replaced nor left out.
    bool is_sacred(int slot) const { return sacred[slot] != 0; }

private:
    const pyorch_substitution & settings;
    const Errors &              errors;
    std::vector<int>            order;
    std::vector<int>            by_weight;
    std::vector<uint8_t>        sacred;
};

} // namespace pyorch
