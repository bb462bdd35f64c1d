// Stored parts of compressed experts: memory for those on their way, and which of them stay (pools.h).
//
// A load of a compressed expert has memory for all its stored parts while it is at work, and none of them goes then.
// When it ends, the expert's rank says in which form it stays beside what kernels compute with; each pool has its own
// least valuable expert, and what leaves a pool goes to the next one that takes a part of it.

#pragma once

#include "residency/pools.h"
#include "residency/residents.h"

namespace pyorch {

class StoredParts {
public:
    explicit StoredParts(Residents & residents) : pools(residents.map), residents(residents) {}

    Pools pools;

    // Gives a load slots for those stored parts that are not there.
    Staged stage(Load & load);

    // Of the stored parts that are there, those of a form stay, and are counted in its pool.
    void keep(Expert & e, Form form);

    // All stored parts of an expert are there, or those that its pool has: its rank says what stays.
    void settle(Expert & e);

    // Until no pool has more than its share, but for what loads are at work with: a load that still waits for memory
    // must not keep others from theirs.
    void trim();

    // The least that loads need.
    uint64_t least() const { return ModelMap::MIN_STAGED * map.parts_bytes(); }

    // Says which expert goes first of the pool that has it. REQUIRES: there are pools
    void set_keys(const Expert & e);

private:
    Residents &      residents;
    const ModelMap & map    = residents.map;
    Bank &           bank   = residents.bank;
    Values &         values = residents.values;
    EvictionOrder &  order  = residents.order;

    uint64_t room() const;
    Expert * least_valuable(Form form);
    Expert * least_valuable();
};

} // namespace pyorch
