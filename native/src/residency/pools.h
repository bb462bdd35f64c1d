// How the budget is divided among the forms of experts, and in which form each expert stays (ZipMoE, section 3.4).
//
// Kernels compute with full experts. Those that come from a compressed pack have, at the end of their load, all their
// parts in memory; then it costs nothing to choose which of them stay. Experts are ranked by how often they are used:
// the first ranks belong into the pool of full experts, the next into that of compressed ones, and so on; all others
// come into the last pool. Within a pool the eviction policy says who goes.
//
// Of the budget, a little is for no pool: it is the memory through which compressed experts come.

#pragma once

#include "model/form.h"
#include "residency/eviction_order.h"

#include <array>
#include <vector>

namespace pyorch {

// Shares of the budget by form (ABSENT has none); their sum is 1.
using PoolShares = std::array<double, N_FORMS>;

inline constexpr PoolShares ALL_FULL = { 0, 1, 0, 0, 0 };

class Pools {
public:
    explicit Pools(const ModelMap & map);

    // A model without compressed experts has full ones only. fewest: bytes that full experts get in any case; passing:
    // of these, what layers need that come: no rank has them, for what was there would go whenever a layer comes.
    // REQUIRES: the budget has room for them, and for the fewest experts on their way
    void divide(uint64_t budget, uint64_t fewest, const PoolShares & shares, uint64_t passing = 0);

    uint64_t limit(Form form) const { return limits[(int) form]; } // bytes
    uint64_t stored_limit() const; // of all stored parts: of the pools, and of those that are on their way

    // Of a layer's experts, uses that ranks go on from: they fade like those that come. [n_expert], none below 0.
    void begin_with(int layer, const double * uses, uint64_t now);

    // Its layer asked for an expert. now: layers computed.
    void used(int layer, int expert, uint64_t now);

    // Where its rank puts it: that without its last use. With it, whoever was used last would outrank his equals.
    // comes: its last use is still to come.
    Form form_of(int layer, int expert, bool comes = false) const;

    // Who has stored parts in a pool, and which of them is the least valuable. Bytes are counted by who moves them.
    uint64_t & bytes(Form form) { return in_use[(int) form]; }
    uint64_t   bytes(Form form) const { return in_use[(int) form]; }
    Victims &  victims(Form form) { return *lists[(int) form - (int) Form::COMPRESSED]; }
    bool       any() const { return !lists.empty(); } // the model has compressed experts

private:
    const ModelMap &                      map;
    std::array<uint64_t, N_FORMS>         limits  = {};
    std::array<uint64_t, N_FORMS>         in_use  = {};
    uint64_t                              staging = 0;
    uint64_t                              passing = 0;
    std::array<double, N_FORMS>           least   = {}; // heat at which each pool ends
    std::vector<std::vector<double>>      heat;         // by layer and expert: log2 of its uses, fading
    std::vector<std::vector<double>>      before;       // the same without its last use
    uint64_t                              ranked = 0;   // when ranks were last looked at
    uint64_t                              latest = 0;   // the last use
    std::vector<std::unique_ptr<Victims>> lists;        // of the forms from COMPRESSED on

    double half_life() const; // in layers computed
    void   rank();
};

} // namespace pyorch
