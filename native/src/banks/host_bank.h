// Experts in host memory: kernels read a slot where it lies.
//
// Addresses for the whole budget are reserved at once, for each size class, and only once: taking and giving back a
// slot asks nothing of the system. A page gets memory when it is first written, or where a device reads it by itself
// with the piece that it is opened in, and loses it only when the slot gives its memory up. A budget that is raised
// later gets further addresses.

#pragma once

#include "banks/bank.h"
#include "banks/page_locks.h"

#include <memory>

namespace pyorch {

class HostBank : public Bank {
public:
    // locks: null where no device reads there.
    HostBank(const ModelMap & map, uint64_t budget, std::shared_ptr<PageLocks> locks = nullptr);
    ~HostBank() override;

    HostBank(const HostBank &)             = delete;
    HostBank & operator=(const HostBank &) = delete;

private:
    // Addresses, of which those before `open` may be read and written, and those before `next` are slots.
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
