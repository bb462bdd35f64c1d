// The order in which the kernels want the numbers of a matrix.
//
// A file has a matrix row by row. For some types and shapes llama.cpp has faster kernels, which want the rows of a
// group interleaved: "repacked", as in its buffer type CPU_REPACK. Which there are, and what order, depends on the
// processor and the build. It is as many bytes, and each group stays where its rows were.

#pragma once

#include "model/model_map.h"

#include "ggml.h"

#include <string>

namespace pyorch {

// GGML_TYPE_COUNT where nobody knows it.
ggml_type type_of(const ExpertTensor & tensor);

// Whether there is such a kernel for the matrices of a tensor.
bool can_repack(const ExpertTensor & tensor);

// Brings one matrix [stride], as it lies in the file, into that order. to: where it lies, or before that.
// REQUIRES: can_repack(tensor).
void repack(const ExpertTensor & tensor, const char * from, char * to);

// Of matrices as they lie in the file.
inline constexpr const char * PLAIN = "plain";

// That, or the name of the repacked order: two are the same if their names are.
std::string layout_name(const ExpertTensor & tensor);

} // namespace pyorch
