// In which order the matrices are recovered that a layer needs and that are not in memory as kernels compute with them
// (ZipMoE, section 3.3 and appendix A: cache-affinity scheduling).
//
// A matrix is read in up to two pieces, its exponents (E) and its signs and mantissas (SM), one read after the other on
// one disk, and decoded by one of several workers. What is to be read and what is only to be decoded depends on what of
// it is in memory already. The order keeps workers busy while the disk is: matrices that need their SM read are the
// bases of blocks, and others are put between them where no worker then waits for longer, until the workers have more
// to do than the disk. Blocks follow one another.
//
// Pure functions: nothing here reads, decodes or waits. The loader uses them where an engine asks for this order
// (PYORCH_RECOVERY_AFFINITY, or PYORCH_RECOVERY_EXPONENTS_FIRST for the paper's order of reads). By default it reads
// and decodes in the order of the kernels, which compute all experts with one matrix before they begin with the next.
// schedule_test.cpp compares the two.

#pragma once

#include <vector>

namespace pyorch {

// Times are of any one unit.
struct RecoveryTask {
    int    expert   = 0;
    double e_read   = 0; // 0: its exponents are in memory
    double sm_read  = 0; // 0: its signs and mantissas are
    double decode   = 0; // of all its shards
    int    n_shards = 1; // which are read and decoded apart, by several workers if they are free; at least 1
    double compute  = 0; // that cannot begin before it is there: what takes longer is recovered first
};

// Who recovers.
struct Recoverer {
    int  n_workers = 1;
    bool one_pass  = false; // a shard is decoded and merged at once: it waits for its matrix' signs and mantissas, too.
                            // Else decoding waits for exponents alone, which are read first in a block
};

// Tasks, by index, that are to be recovered together, the first of them first. Reads of a block: task by task if
// decoding takes one pass; else first all exponents, then all signs and mantissas, both in the order of the tasks.
using RecoveryBlock = std::vector<int>;

// All tasks, each once.
std::vector<RecoveryBlock> schedule(const std::vector<RecoveryTask> & tasks, const Recoverer & recoverer);

// When each task is recovered, if the disk never rests and a free worker takes the first task of which it can decode a
// shard.
std::vector<double> recovery_times(
    const std::vector<RecoveryTask> & tasks, const std::vector<RecoveryBlock> & blocks, const Recoverer & recoverer);

} // namespace pyorch
