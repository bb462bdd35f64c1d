// Experts in host memory: kernels read the slots in place.
//
// For each size class, addresses for the whole budget are reserved once. So taking and giving back a slot needs no
// system call. A page gets memory when it is first written, or with the whole locked piece if a device reads host
// memory directly. It loses it only when the slot is stripped. If the budget is raised, more addresses are reserved.

#pragma once

#include "banks/bank.h"
#include "banks/page_locks.h"

#include <memory>

namespace pyorch {

class HostBank : public Bank {
public:
    // locks: null if no device reads host memory directly.
    HostBank(const ModelMap & map, uint64_t budget, std::shared_ptr<PageLocks> locks = nullptr);
    ~HostBank() override;

    HostBank(const HostBank &)             = delete;
    HostBank & operator=(const HostBank &) = delete;

private:
    // A range of addresses. Before `open` they may be read and written; before `next` they are slots.
    struct Region {
        char * begin;
        char * open;
        char * next;
        char * end;
    };

    std::vector<std::vector<Region>> regions; // by size class, the last one is extended
    std::shared_ptr<PageLocks>       locks;

    char * extend(int size_class) override;
    void   strip(int size_class, char * slot) override;
    bool   reserve(int size_class, uint64_t n_slots);
};

} // namespace pyorch
