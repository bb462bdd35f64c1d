// Where the bytes of experts live, under a budget, and how a kernel gets at them.
//
// A bank has slots of a few sizes, one size class for each size that experts of the model have in some form. A slot
// is the memory of one expert. Whoever takes a slot owns it until giving it back; its contents are then lost.
// Of every byte that is taken, or kept for the next who takes a slot of that class, the bank keeps count, and there
// are never more of them than the budget allows, but for what was taken before the budget was lowered.
//
// Not thread-safe: the residency table's mutex guards a bank. What lies in a slot belongs to who took it.

#pragma once

#include "model/form.h"

#include <cstdint>
#include <functional>

namespace pyorch {

struct Slot {
    int    size_class = -1; // -1: no slot
    char * memory     = nullptr;
    bool   fresh      = false; // its pages get memory when they are first written

    explicit operator bool() const { return size_class >= 0; }
};

class Bank {
public:
    virtual ~Bank() = default;

    // Of an expert of a layer (index into the layers with experts) in a form; -1 for one that takes no memory.
    virtual int size_class(int layer, Form form) const = 0;

    // Whether so many slots of a class can be taken before others are given back.
    virtual bool fits(int size_class, int n) const = 0;

    // A slot of the class; none where it does not fit, or the system has no memory for it.
    virtual Slot take(int size_class) = 0;
    virtual void give(const Slot & slot) = 0;

    // What is taken may exceed a lowered budget until it is given back.
    virtual void     set_budget(uint64_t bytes) = 0;
    virtual uint64_t budget() const = 0;

    // Called with the memory of each slot whose pages go back to the system.
    virtual void on_give_up(std::function<void(char * slot)> given_up) = 0;

    virtual uint64_t taken() const = 0; // bytes in slots that are taken
    virtual uint64_t used() const = 0;  // the same, and those kept for the next who takes one
    virtual uint64_t peak() const = 0;  // the most that used() was since reset_peak()
    virtual void     reset_peak() = 0;
};

} // namespace pyorch
