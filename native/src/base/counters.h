// Structs of 64-bit counters of the API. They are added up as arrays, without naming each field again.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace pyorch {

template <typename Counts>
void add_counts(Counts & to, const Counts & from) {
    static_assert(std::is_trivially_copyable_v<Counts> && sizeof(Counts) % sizeof(uint64_t) == 0);
    constexpr size_t N = sizeof(Counts) / sizeof(uint64_t);
    uint64_t         sum[N], more[N];
    memcpy(sum, &to, sizeof(Counts));
    memcpy(more, &from, sizeof(Counts));
    for (size_t i = 0; i < N; ++i) {
        sum[i] += more[i];
    }
    memcpy(&to, sum, sizeof(Counts));
}

} // namespace pyorch
