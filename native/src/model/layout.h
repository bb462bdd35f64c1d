// The order of a matrix's numbers that kernels want.
//
// A file stores a matrix row by row. For some types and shapes llama.cpp has faster kernels, which want groups of rows
// interleaved: "repacked", as in its buffer type CPU_REPACK. The processor and the build decide which exist, and their
// order. Repacking does not change the number of bytes, and each group stays in the place of its rows.

#pragma once

#include "model/model_map.h"

#include "ggml.h"

#include <string>

namespace pyorch {

// Returns the type, or GGML_TYPE_COUNT if it is unknown.
ggml_type type_of(const ExpertTensor & tensor);

// Returns whether repacked kernels exist for the matrices of a tensor.
bool can_repack(const ExpertTensor & tensor);

// Repacks one matrix [stride] from the file's order. to: equal to `from`, or before it.
// REQUIRES: can_repack(tensor).
void repack(const ExpertTensor & tensor, const char * from, char * to);

// The name of the file's order.
inline constexpr const char * PLAIN = "plain";

// Returns PLAIN, or the name of the repacked order. Equal names mean equal orders.
std::string layout_name(const ExpertTensor & tensor);

} // namespace pyorch
