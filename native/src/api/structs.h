// Structs that cross the API: each begins with its size, as the caller knows it, so caller and library may be of
// different versions. Here is what becomes of the rest.

#pragma once

#include "base/status.h"

#include <algorithm>
#include <cstring>

namespace pyorch {

// A size that no version of a struct has is memory that was never set.
inline void check_struct_size(uint64_t size, const char * name) {
    constexpr uint64_t MOST = 4096;
    if (size < sizeof(uint64_t) || size > MOST || size % sizeof(uint64_t) != 0) {
        throw Failure(PYORCH_INVALID,
            format(
                "the struct_size of a %s cannot be %llu: set it to sizeof(%s)", name, (unsigned long long) size, name));
    }
}

template <typename T>
void check_struct(const T * value, const char * name) {
    if (!value) {
        throw Failure(PYORCH_INVALID, format("a %s is missing", name));
    }
    check_struct_size(value->struct_size, name);
}

// Writes as much of value as the caller has room for, and zeros behind it.
template <typename T>
void write_struct(T * to, const char * name, const T & value) {
    check_struct(to, name);
    const uint64_t size = to->struct_size;
    memset((void *) to, 0, size);
    memcpy((void *) to, &value, std::min<uint64_t>(size, sizeof(T)));
    to->struct_size = size;
}

// The same where struct_size was not set yet.
template <typename T>
void write_default(T * to, uint64_t size, const char * name, const T & value) {
    if (!to) {
        throw Failure(PYORCH_INVALID, format("a %s is missing", name));
    }
    check_struct_size(size, name);
    memset((void *) to, 0, size);
    to->struct_size = size;
    write_struct(to, name, value);
}

// What the caller gave; fields that its version of the struct lacks have the value of defaults. Fields that this
// library lacks must be zero: else they ask for something that would be left undone.
template <typename T>
T read_struct(const T * from, const char * name, const T & defaults) {
    check_struct(from, name);
    const uint64_t size  = from->struct_size;
    const char *   bytes = (const char *) from;
    if (size > sizeof(T) && std::any_of(bytes + sizeof(T), bytes + size, [](char byte) { return byte != 0; })) {
        throw Failure(PYORCH_INVALID,
            format("a %s sets something that this library, of version %s, does not know", name, PYORCH_VERSION));
    }
    T value = defaults;
    memcpy((void *) &value, bytes, std::min<uint64_t>(size, sizeof(T)));
    value.struct_size = sizeof(T);
    return value;
}

} // namespace pyorch
