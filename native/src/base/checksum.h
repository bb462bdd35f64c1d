// Checksums of packs: XXH3 with 64 bits, against damage, not against forgery.

#pragma once

#include <cstddef>
#include <cstdint>

namespace pyorch {

uint64_t checksum(const void * data, size_t bytes);

} // namespace pyorch
