// Memory for experts, under the budget.
//
// A block holds one matrix of one expert. Blocks of a freed expert are kept for the next one of the
// same size, because a fresh mapping costs a page fault for every page of it. The pool counts every
// byte that it has from the system, in use or kept, and never has more than the budget.
// Not thread-safe: the residency table's mutex guards it.

#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace pyorch {

class BlockPool {
public:
    explicit BlockPool(uint64_t budget) : budget(budget) {}
    ~BlockPool();

    BlockPool(const BlockPool &) = delete;
    BlockPool & operator=(const BlockPool &) = delete;

    // A block of so many bytes, page-aligned when it has a page or more. Null when the budget, or the
    // system, has no room for it: then free() others first.
    char * alloc(uint64_t bytes);
    void   free(char * block, uint64_t bytes);

    // Bytes that alloc() can still give, if blocks kept for other sizes are given up.
    uint64_t available() const { return budget > used ? budget - used : 0; }

    // Gives kept blocks back to the system until the pool fits. What is in use may still exceed it.
    void set_budget(uint64_t bytes);

    uint64_t budget;
    uint64_t used = 0; // in blocks that are allocated
    uint64_t kept = 0; // in blocks that wait for reuse
    uint64_t peak = 0; // the most that used + kept ever was

private:
    std::map<uint64_t, std::vector<char *>> free_blocks; // by size

    void give_back(uint64_t until);
};

} // namespace pyorch
