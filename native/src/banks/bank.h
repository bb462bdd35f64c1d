// The memory of experts' bytes under a budget.
//
// A bank has slots in size classes, one for each size that a part of an expert of the model has. A slot is the memory
// of one part (model/form.h). The caller of take() owns the slot until it gives it back; then the contents are lost.
// The bank counts the bytes in slots that are taken or kept for the next caller. They never exceed the budget, except
// for slots that were taken before the budget was lowered.
//
// The budget has two sides: the part for kernels and the stored parts. Neither side takes memory of the other, so the
// coming and going of compressed experts does not change the class of memory. After the budget is divided anew, stored
// parts may still exceed their side; then there is less for full experts, and the owner of stored parts must give some
// back.
//
// A slot that is given back keeps its memory for the next one of its class, because fresh memory costs a page fault for
// each page. Only if the budget has room for a slot of one class, but kept slots of other classes have the memory, do
// these lose theirs. A derived class provides the memory.
//
// Not thread-safe: the residency table's mutex guards a bank. The owner of a slot may use its memory without it.

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

    // Returns the class for a part of a layer's experts (index into the layers with experts); -1 if it needs no memory.
    int size_class(int layer, Part part) const { return class_of[layer][part]; }

    // Returns whether n slots of a class can be taken before others are given back.
    bool fits(int size_class, int n) const;

    // Takes a slot of the class. Returns none if it does not fit, or the system has no memory for it.
    Slot take(int size_class);
    void give(const Slot & slot);

    // Sets the budget, and its side for stored parts. Taken slots may exceed a lowered budget until given back.
    void     set_budget(uint64_t bytes, uint64_t stored);
    uint64_t budget() const { return matrices.limit + stored.limit; }
    uint64_t matrices_budget() const { return matrices.limit; } // without stored parts

    // Sets a function that is called with each slot before the system gets its pages.
    void on_give_up(std::function<void(char * slot)> f) { given_up = std::move(f); }

    uint64_t matrices_taken() const { return matrices.taken; }        // bytes of taken slots for kernels
    uint64_t stored_taken() const { return stored.taken; }            // bytes of taken slots of stored parts
    uint64_t used() const { return matrices.used() + stored.used(); } // bytes of taken and kept slots
    uint64_t peak() const { return peak_bytes; }                      // the most bytes used since reset_peak()
    void     reset_peak() { peak_bytes = used(); }

protected:
    struct SizeClass {
        uint64_t            slot_bytes;
        bool                is_stored;      // for stored parts
        uint64_t            n_experts = 0;  // of the model: the largest number of taken slots
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

    // Returns addresses for one more slot of the class, still without memory. Null: the system has none.
    virtual char * extend(int size_class) = 0;

    // Gives the memory of a slot to the system, but keeps its addresses.
    virtual void strip(int size_class, char * slot) = 0;

    void give_up(int size_class, char * slot);

    Account & account_of(const SizeClass & c) { return c.is_stored ? stored : matrices; }

    // Strips kept slots until at most `until` bytes of one side are in use, or no slot is kept.
    void strip_kept(Account & account, uint64_t until);

    // Strips kept slots until the budget has room for `bytes` more, or no slot is kept.
    void strip_for(uint64_t bytes);
};

} // namespace pyorch
