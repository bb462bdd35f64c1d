// Where the bytes of experts live, under a budget, and how a kernel gets at them.
//
// A bank has slots of a few sizes, one size class for each size that a part of an expert of the model has. A slot
// is the memory of one part (model/form.h). Whoever takes a slot owns it until giving it back; its contents are
// then lost. Of every byte that is taken, or kept for the next who takes a slot of that class, the bank keeps count,
// and there are never more of them than the budget allows, but for what was taken before the budget was lowered.
//
// The budget is divided: so much for what kernels compute with, the rest for stored parts. Neither takes memory of
// the other, so no memory changes its class because compressed experts come and go. While one of them still has more
// than its part, because the budget was divided anew, there is less for full experts; who takes stored parts sees to
// that himself.
//
// A slot that is given back keeps its memory for the next of its class: fresh memory costs a page fault for every
// page. Only when the budget has room for a slot of one class and the memory lies in kept slots of others do those
// give theirs up. What the memory is, a bank that derives from this one knows.
//
// Not thread-safe: the residency table's mutex guards a bank. What lies in a slot belongs to who took it.

#pragma once

#include "model/form.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace pyorch {

struct Slot {
    int    size_class = -1; // -1: no slot
    char * memory     = nullptr;
    bool   fresh      = false; // its pages get memory when they are first written

    explicit operator bool() const { return size_class >= 0; }
};

class Bank {
public:
    Bank(const ModelMap & map, uint64_t budget);
    virtual ~Bank() = default;

    // Of a part of an expert of a layer (index into the layers with experts); -1 for one that takes no memory.
    int size_class(int layer, Part part) const { return class_of[layer][part]; }

    // Whether so many slots of a class can be taken before others are given back.
    bool fits(int size_class, int n) const;

    // A slot of the class; none where it does not fit, or the system has no memory for it.
    Slot take(int size_class);
    void give(const Slot & slot);

    // For all, and of that for stored parts. What is taken may exceed a lowered budget until it is given back.
    void     set_budget(uint64_t bytes, uint64_t stored);
    uint64_t budget() const { return matrices.limit + stored.limit; }
    uint64_t matrices_budget() const { return matrices.limit; } // without stored parts

    // Called with the memory of each slot whose pages go back to the system.
    void on_give_up(std::function<void(char * slot)> f) { given_up = std::move(f); }

    uint64_t matrices_taken() const { return matrices.taken; }        // bytes in slots, but for stored parts
    uint64_t stored_taken() const { return stored.taken; }            // those
    uint64_t used() const { return matrices.used() + stored.used(); } // and those kept for the next who takes one
    uint64_t peak() const { return peak_bytes; }                      // the most that was since reset_peak()
    void     reset_peak() { peak_bytes = used(); }

protected:
    struct SizeClass {
        uint64_t            slot_bytes;
        bool                is_stored;      // of stored parts
        uint64_t            n_experts = 0;  // of the model: more slots than these are never taken
        std::vector<char *> kept      = {}; // with their memory
        std::vector<char *> bare      = {}; // without
    };

    std::vector<SizeClass> classes;

private:
    // Bytes of one side of the budget.
    struct Account {
        uint64_t limit = 0;
        uint64_t taken = 0;
        uint64_t kept  = 0;

        uint64_t used() const { return taken + kept; }
    };

    std::vector<std::vector<int>> class_of; // by layer and part
    Account                       matrices;
    Account                       stored;
    uint64_t                      peak_bytes = 0;
    std::function<void(char *)>   given_up;

    // A place for one more slot of the class, without memory yet. Null where the system has none.
    virtual char * extend(int size_class) = 0;

    // Gives the memory of a slot to the system; the place stays.
    virtual void strip(int size_class, char * slot) = 0;

    void give_up(int size_class, char * slot);

    Account & account_of(const SizeClass & c) { return c.is_stored ? stored : matrices; }

    // Until so many bytes of one side are in use, or nothing is kept.
    void strip_kept(Account & account, uint64_t until);

    // Until all have memory for so many bytes more, or nothing is kept.
    void strip_for(uint64_t bytes);
};

} // namespace pyorch
