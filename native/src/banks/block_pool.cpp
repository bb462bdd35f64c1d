#include "banks/block_pool.h"

#include <algorithm>
#include <cstdlib>
#include <sys/mman.h>

namespace pyorch {

static constexpr uint64_t PAGE = 4096;

static char * system_alloc(uint64_t bytes) {
    if (bytes < PAGE) {
        void * p = nullptr;
        return posix_memalign(&p, 64, bytes) == 0 ? (char *) p : nullptr;
    }
    void * p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? nullptr : (char *) p;
}

static void system_free(char * block, uint64_t bytes) {
    if (bytes < PAGE) {
        std::free(block);
    } else {
        munmap(block, bytes);
    }
}

BlockPool::~BlockPool() {
    give_back(0);
}

void BlockPool::give_back(uint64_t until) {
    for (auto & [bytes, blocks] : free_blocks) {
        while (!blocks.empty() && used + kept > until) {
            system_free(blocks.back(), bytes);
            blocks.pop_back();
            kept -= bytes;
        }
    }
}

char * BlockPool::alloc(uint64_t bytes) {
    if (used + bytes > budget) {
        return nullptr;
    }
    auto & same = free_blocks[bytes];
    if (!same.empty()) {
        char * block = same.back();
        same.pop_back();
        kept -= bytes;
        used += bytes;
        return block;
    }
    if (used + kept + bytes > budget) {
        give_back(budget - bytes);
    }
    char * block = system_alloc(bytes);
    if (block) {
        used += bytes;
        peak = std::max(peak, used + kept);
    }
    return block;
}

void BlockPool::free(char * block, uint64_t bytes) {
    used -= bytes;
    if (used + kept + bytes > budget) {
        system_free(block, bytes); // the budget was lowered meanwhile
        return;
    }
    kept += bytes;
    free_blocks[bytes].push_back(block);
}

void BlockPool::set_budget(uint64_t bytes) {
    budget = bytes;
    give_back(bytes);
}

} // namespace pyorch
