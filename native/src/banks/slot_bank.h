// The slots of a bank, counted: which are kept for reuse, and what goes when another class needs the memory.
//
// A slot that is given back keeps its memory for the next of its class: fresh memory costs a page fault for every
// page. Only when the budget has room for a slot of one class and the memory lies in kept slots of others do those
// give theirs up. What the memory is, a bank that derives from this one knows.

#pragma once

#include "banks/bank.h"

#include <vector>

namespace pyorch {

class SlotBank : public Bank {
public:
    SlotBank(const ModelMap & map, uint64_t budget);

    int      size_class(int layer, Part part) const override { return class_of[layer][part]; }
    bool     fits(int size_class, int n) const override;
    Slot     take(int size_class) override;
    void     give(const Slot & slot) override;
    void     set_budget(uint64_t bytes, uint64_t stored) override;
    uint64_t budget() const override { return matrices.limit + stored.limit; }
    uint64_t matrices_budget() const override { return matrices.limit; }
    void     on_give_up(std::function<void(char * slot)> f) override { given_up = std::move(f); }
    uint64_t matrices_taken() const override { return matrices.taken; }
    uint64_t stored_taken() const override { return stored.taken; }
    uint64_t used() const override { return matrices.used() + stored.used(); }
    uint64_t peak() const override { return peak_bytes; }
    void     reset_peak() override { peak_bytes = used(); }

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
