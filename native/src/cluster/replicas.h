// Which of several servers that have an expert is asked for it; simulated clusters ask this, too.

#pragma once

#include "pyorch-cluster.h"

#include <vector>

namespace pyorch {

// One more answer; older ones fade.
void note_answer(pyorch_pace & pace, int n_slots, double seconds);

// For each expert, with slots[n], one of its places: the one that is expected to have answered first, with all that it
// is asked for in this ubatch and before; of equals the first. Experts with most slots choose first. -1: it has none.
std::vector<int> choose_replicas(const std::vector<std::vector<int>> & places, const std::vector<int> & slots,
    const std::vector<pyorch_pace> & paces);

} // namespace pyorch
