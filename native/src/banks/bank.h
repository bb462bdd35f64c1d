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

    // Of a part of an expert of a layer (index into the layers with experts); -1 for one that takes no memory.
    virtual int size_class(int layer, Part part) const = 0;

    // Whether so many slots of a class can be taken before others are given back.
    virtual bool fits(int size_class, int n) const = 0;

    // A slot of the class; none where it does not fit, or the system has no memory for it.
    virtual Slot take(int size_class) = 0;

    virtual void give(const Slot & slot) = 0;

    // For all, and of that for stored parts. What is taken may exceed a lowered budget until it is given back.
    virtual void     set_budget(uint64_t bytes, uint64_t stored) = 0;
    virtual uint64_t budget() const                              = 0;
    virtual uint64_t matrices_budget() const                     = 0; // without stored parts

    // Called with the memory of each slot whose pages go back to the system.
    virtual void on_give_up(std::function<void(char * slot)> given_up) = 0;

    virtual uint64_t matrices_taken() const = 0; // bytes in slots that are taken, but for stored parts
    virtual uint64_t stored_taken() const   = 0; // those
    virtual uint64_t used() const           = 0; // the same, and those kept for the next who takes one
    virtual uint64_t peak() const           = 0; // the most that used() was since reset_peak()
    virtual void     reset_peak()           = 0;
};

} // namespace pyorch
