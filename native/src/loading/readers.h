// The threads that bring experts in.

#pragma once

#include "residency/residency.h"

#include <thread>
#include <vector>

namespace pyorch {

class Readers {
public:
    Readers(ResidencyTable & table, int n_threads);
    ~Readers(); // ends the requests under way, leaves the rest

private:
    ResidencyTable &         table;
    std::vector<std::thread> threads;
};

} // namespace pyorch
