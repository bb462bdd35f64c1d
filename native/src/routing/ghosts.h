// Ghosts: estimates of absent experts' outputs, from the input of their router. Lossy.
//
// A ghost is the mean output of its expert plus a linear map of low rank from the router's input to the difference:
// output = mean + up^T (down input). All ghosts of a model stay in memory and need a few hundredths of the experts'
// bytes. convert/ghosts.py fits them.

#pragma once

#include "prediction/compact_matrix.h"
#include "pyorch.h"

#include <cstdint>
#include <vector>

namespace pyorch {

// The ghosts of one layer. Immutable.
class GhostLayer {
public:
    // Copies the arrays. Throws Failure if they are not valid.
    explicit GhostLayer(const pyorch_ghosts & ghosts);

    const int n_expert, n_in, n_out;

    bool has(int expert) const { return rank[expert] >= 0; }

    // Computes outputs[i][n_out] of a ghost for inputs[i][n_in]. Reads each of its rows once for all inputs. An output
    // does not depend on the others. REQUIRES: has(expert)
    void compute(int expert, const std::vector<const float *> & inputs, const std::vector<float *> & outputs) const;

    // Returns the work of compute() for so many inputs, in rows.
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

// Divides the ghosts of a batch into jobs for n threads, of which thread i takes every nth job from the ith on: the
// largest first, and none with so many slots that other threads would wait. requested: by slot. slots: those of ghosts.
std::vector<GhostJob> ghost_jobs(const GhostLayer & layer, const int32_t * requested, const std::vector<int> & slots);

} // namespace pyorch
