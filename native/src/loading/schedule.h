// The order in which matrices that a layer needs are recovered (ZipMoE, section 3.3 and appendix A: cache-affinity
// scheduling).
//
// A matrix is read in up to two pieces, exponents (E) and signs and mantissas (SM), one after the other from one disk.
// One of several workers decodes it. Pieces in memory are not read. The order keeps workers and disk busy: matrices
// whose SM must be read are the bases of blocks. Other matrices are put between them if no worker then waits longer,
// until the workers have more work than the disk. Blocks follow one another.
//
// Pure functions: they read, decode and wait for nothing. The loader uses them if an engine asks for this order
// (PYORCH_RECOVERY_AFFINITY, or PYORCH_RECOVERY_EXPONENTS_FIRST for the paper's order of reads). By default it reads
// and decodes in the order of the kernels, which compute one matrix of all experts before they begin with the next.
// schedule_test.cpp compares the two.

#pragma once

#include <vector>

namespace pyorch {

// All times have the same unit.
struct RecoveryTask {
    int    expert   = 0;
    double e_read   = 0; // 0: its exponents are in memory
    double sm_read  = 0; // 0: its signs and mantissas are in memory
    double decode   = 0; // of all its shards
    int    n_shards = 1; // which are read and decoded apart, by several workers if they are free; at least 1
    double compute  = 0; // of the expert, after it is recovered: the longest is recovered first
};

// The workers.
struct Recoverer {
    int  n_workers = 1;
    bool one_pass  = false; // a shard is decoded and merged at once, so it waits for its signs and mantissas, too.
                            // Otherwise decoding waits for exponents only, which are read first in a block
};

// Tasks, by index, that are recovered together, in this order. Reads of a block: task by task if decoding takes one
// pass; otherwise all exponents, then all signs and mantissas, both in the order of the tasks.
using RecoveryBlock = std::vector<int>;

// All tasks, each once.
std::vector<RecoveryBlock> schedule(const std::vector<RecoveryTask> & tasks, const Recoverer & recoverer);

// The end of each task's recovery, if the disk never rests, and a free worker takes the first task with a shard that it
// can decode.
std::vector<double> recovery_times(
    const std::vector<RecoveryTask> & tasks, const std::vector<RecoveryBlock> & blocks, const Recoverer & recoverer);

} // namespace pyorch
