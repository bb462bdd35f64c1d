// Divides the budget among the forms of experts, and chooses the form in which each expert stays (ZipMoE, section 3.4).
//
// Kernels compute with full experts. At the end of its load, an expert of a compressed pack has all its parts in
// memory; so any of them may stay at no cost. Experts are ranked by frequency of use: the first ranks belong into the
// pool of full experts, the next into the pool of compressed ones, and so on; all others into the last pool. Within a
// pool the eviction policy chooses the victim.
//
// A small part of the budget belongs to no pool: compressed experts pass through it while they are read.

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

    // Without compressed experts all are full. fewest: the least bytes of full experts; transient: the part of fewest
    // that coming layers need. No rank has them, because their experts are evicted whenever a layer comes.
    // REQUIRES: the budget has room for them, and for the fewest experts that are being read.
    void divide(uint64_t budget, uint64_t fewest, const PoolShares & shares, uint64_t transient = 0);

    uint64_t limit(Form form) const { return limits[(int) form]; } // bytes
    uint64_t stored_limit() const;                                 // of all stored parts, in pools and of running loads

    // Counts of uses of a layer's experts before this run, [n_expert], >= 0. They fade like later uses.
    void begin_with(int layer, const double * uses, uint64_t now);

    // Its layer asked for an expert. now: computed layers.
    void used(int layer, int expert, uint64_t now);

    // The pool of its rank, without its last use. With it, the last used expert would outrank its equals.
    // comes: its last use is still to come.
    Form form_of(int layer, int expert, bool comes = false) const;

    // The experts with stored parts in a pool, and the least valuable one. The caller that moves bytes counts them.
    uint64_t & bytes(Form form) { return in_use[(int) form]; }
    uint64_t   bytes(Form form) const { return in_use[(int) form]; }
    Victims &  victims(Form form) { return *lists[(int) form - (int) Form::COMPRESSED]; }
    bool       any() const { return !lists.empty(); } // the model has compressed experts

private:
    const ModelMap &                      map;
    std::array<uint64_t, N_FORMS>         limits    = {};
    std::array<uint64_t, N_FORMS>         in_use    = {};
    uint64_t                              staging   = 0;
    uint64_t                              transient = 0;
    std::array<double, N_FORMS>           least     = {}; // heat at which each pool ends
    std::vector<std::vector<double>>      heat;           // by layer and expert: log2 of its uses, fading
    std::vector<std::vector<double>>      before;         // the same, without its last use
    uint64_t                              ranked = 0;     // when the ranks were last sorted
    uint64_t                              latest = 0;     // the last use
    std::vector<std::unique_ptr<Victims>> lists;          // of the forms from COMPRESSED on

    double half_life() const; // in layers computed
    void   rank();
};

} // namespace pyorch
