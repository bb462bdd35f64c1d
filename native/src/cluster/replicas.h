// Chooses among several servers with an expert; simulated clusters use it, too.

#pragma once

#include "pyorch-cluster.h"

#include <vector>

namespace pyorch {

// Adds an answer; older ones fade.
void note_answer(pyorch_pace & pace, int n_slots, double seconds);

// For each expert, with slots[n], one of its places: the one with the earliest expected answer, with all its slots of
// this ubatch and those that wait; of equal ones the first. Experts with most slots choose first. -1: no place.
std::vector<int> choose_replicas(const std::vector<std::vector<int>> & places, const std::vector<int> & slots,
    const std::vector<pyorch_pace> & paces);

} // namespace pyorch
