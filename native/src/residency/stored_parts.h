// Stored parts of compressed experts: the memory of running loads, and the parts that stay in pools (pools.h).
//
// A running load of a compressed expert has memory for all its stored parts, and no part is evicted. At its end
// the expert's rank gives the form in which it stays, besides the full form. Each pool has its own least valuable
// expert; an expert that leaves a pool goes to the next pool that takes some of its parts.

#pragma once

#include "residency/pools.h"
#include "residency/residents.h"

namespace pyorch {

class StoredParts {
public:
    explicit StoredParts(Residents & residents) : pools(residents.map), residents(residents) {}

    Pools pools;

    // Gives a load slots for its absent stored parts.
    Staged stage(Load & load);

    // Of the stored parts in memory, the parts of a form stay, and count in its pool.
    void keep(Expert & e, Form form);

    // The stored parts of an expert are in memory, all or the pool's: its rank decides which stay.
    void settle(Expert & e);

    // Evicts until no pool has more than its share, apart from the parts of running loads. A load that waits for memory
    // must not keep others from theirs.
    void trim();

    // The least bytes that loads need.
    uint64_t least() const { return ModelMap::MIN_STAGED * map.parts_bytes(); }

    // Gives the order of a pool its keys. REQUIRES: there are pools.
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
