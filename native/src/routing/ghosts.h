// Ghosts: what an absent expert would have given, estimated from what its router saw. Lossy.
//
// A ghost is the mean output of its expert, and a linear map of low rank of the router's input for what differs from
// it: output = mean + up^T (down input). All ghosts of a model stay in memory, where they take a few hundredths of what
// the experts do. How they are fitted: convert/ghosts.py.

#pragma once

#include "prediction/compact_matrix.h"
#include "pyorch.h"

#include <cstdint>
#include <vector>

namespace pyorch {

// The ghosts of one layer. Does not change once it is made.
class GhostLayer {
public:
    // Copies the arrays. Throws Failure for what cannot be.
    explicit GhostLayer(const pyorch_ghosts & ghosts);

    const int n_expert, n_in, n_out;

    bool has(int expert) const { return rank[expert] >= 0; }

    // outputs[i][n_out] of a ghost for inputs[i][n_in]. Each of its rows is read once for all of them; what an output
    // gets does not depend on the others. REQUIRES: has(expert)
    void compute(int expert, const std::vector<const float *> & inputs, const std::vector<float *> & outputs) const;

    // What compute() has to do for so many inputs, in rows.
    int64_t work(int expert, size_t n_inputs) const { return (1 + rank[expert]) * (int64_t) (1 + n_inputs); }

private:
    std::vector<int> rank;  // [n_expert], -1: no ghost
    std::vector<int> begin; // [n_expert]: its rows in down and up
    CompactMatrix    mean, down, up;
};

// Slots of one expert.
struct GhostJob {
    int              expert;
    std::vector<int> slots; // ascending
};

// What ghosts compute of a batch, for threads of which thread i takes every nth job from the ith on: the largest first,
// and none of so many slots that others would wait for it. requested: by slot; slots: those of ghosts.
std::vector<GhostJob> ghost_jobs(const GhostLayer & layer, const int32_t * requested, const std::vector<int> & slots);

} // namespace pyorch
