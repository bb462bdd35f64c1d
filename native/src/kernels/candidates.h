// The kernels of each kind of processor. They are null for types that they do not have, and on other processors.

#pragma once

#include "kernels/kernels.h"

namespace pyorch {

// 512 bits, products of bytes (VNNI): repacked Q4_0, IQ4_NL, MXFP4 and Q4_K, and plain Q8_0.
Kernel avx512_integer_kernel(ggml_type type, bool repacked);

// 512 bits: BF16 with its own products, F16.
Kernel avx512_float_kernel(ggml_type type, bool repacked);

// 256 bits: repacked Q4_0, IQ4_NL, MXFP4 and Q4_K.
Kernel avx2_integer_kernel(ggml_type type, bool repacked);

} // namespace pyorch
