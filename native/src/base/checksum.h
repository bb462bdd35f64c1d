// Checksums of what lies in packs: XXH3 with 64 bits, which finds any damage and guards against no forger.

#pragma once

#include <cstddef>
#include <cstdint>

namespace pyorch {

uint64_t checksum(const void * data, size_t bytes);

} // namespace pyorch
