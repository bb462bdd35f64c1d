#include "base/checksum.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace pyorch {

uint64_t checksum(const void * data, size_t bytes) { return XXH3_64bits(data, bytes); }

} // namespace pyorch
