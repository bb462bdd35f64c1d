#include "banks/host_bank.h"

#include <algorithm>
#include <sys/mman.h>

namespace pyorch {

// Addresses are opened for writing in steps. Each step is a system call, but open memory counts as used if the system
// does not overcommit.
static constexpr uint64_t STEP = 32u << 20;

HostBank::HostBank(const ModelMap & map, uint64_t budget, std::shared_ptr<PageLocks> page_locks) :
        Bank(map, budget), regions(classes.size()), locks(std::move(page_locks)) {
    for (int i = 0; i < (int) classes.size(); ++i) {
        reserve(i, std::min(classes[i].n_experts, budget / classes[i].slot_bytes));
    }
}

HostBank::~HostBank() {
    for (const auto & of_class : regions) {
        for (const Region & region : of_class) {
            if (locks) {
                locks->unlock(region.begin, region.end - region.begin);
            }
            munmap(region.begin, region.end - region.begin);
        }
    }
}

bool HostBank::reserve(int size_class, uint64_t n_slots) {
    const uint64_t bytes = round_up(n_slots * classes[size_class].slot_bytes, PAGE);
    if (bytes == 0) {
        return false;
    }
    // Reserves only addresses; no memory counts as used before it is opened.
    void * p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        return false;
    }
#ifdef MADV_NOHUGEPAGE
    // A huge page would allocate memory for slots that are not taken.
    madvise(p, bytes, MADV_NOHUGEPAGE);
#endif
#ifdef MADV_DONTFORK
    // A child process needs no experts, and would get a copy of memory that a reader has pinned.
    madvise(p, bytes, MADV_DONTFORK);
#endif
    char * begin = (char *) p;
    regions[size_class].push_back({ begin, begin, begin, begin + bytes });
    return true;
}

char * HostBank::extend(int size_class) {
    const uint64_t bytes = classes[size_class].slot_bytes;
    auto &         all   = regions[size_class];
    if (all.empty() || all.back().next + bytes > all.back().end) {
        // If slots are no whole pages, a page at the end may stay unused, but never a slot.
        uint64_t n_slots = 0;
        for (const Region & region : all) {
            n_slots += (region.next - region.begin) / bytes;
        }
        const uint64_t more = std::min(classes[size_class].n_experts, budget() / bytes);
        if (!reserve(size_class, more > n_slots ? more - n_slots : 1)) {
            return nullptr;
        }
    }
    Region & region = all.back();
    if (region.next + bytes > region.open) {
        const uint64_t step = std::min<uint64_t>(round_up(std::max(STEP, bytes), PAGE), region.end - region.open);
        if (mprotect(region.open, step, PROT_READ | PROT_WRITE) != 0) {
            return nullptr;
        }
        if (locks && !classes[size_class].is_stored) { // a device reads no stored parts
            locks->lock(region.open, step);
        }
        region.open += step;
    }
    char * slot = region.next;
    region.next += bytes;
    return slot;
}

void HostBank::strip(int size_class, char * slot) {
    // Keeps a page that is shared with the next slot: slots that share pages are small.
    char * first = (char *) round_up((uint64_t) slot, PAGE);
    char * last  = (char *) ((uint64_t) (slot + classes[size_class].slot_bytes) / PAGE * PAGE);
    if (first < last) {
        if (locks) {
            locks->unlock(first, last - first);
        }
        madvise(first, last - first, MADV_DONTNEED);
    }
}

} // namespace pyorch
