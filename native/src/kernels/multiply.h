// How a compute thread multiplies one expert of a mul_mat_id: its share of the matrix's rows times all inputs.

#pragma once

#include "kernels/kernels.h"

namespace pyorch {

// How the matrices of a tensor of experts are multiplied.
struct Multiplication {
    Kernel kernel  = nullptr; // null: llama.cpp's own
    bool   nibbles = false;   // matrices have the form of codecs/nibble.h
};

// What a thread is given: an expert of `op`, and the pairs of slot and token that its inputs are.
struct ExpertInputs {
    ggml_tensor *   op;
    const uint8_t * matrix;
    const int32_t * pairs; // [n][2]
    int64_t         n;
    const uint8_t * quantized; // src[1] of op, quantized, without gaps
    int             thread, n_threads;
    int *           next_chunk; // n_threads at first, shared by the threads; null: each thread takes an equal share
};

// False if llama.cpp's kernel must compute it; each thread gets the same answer.
bool multiply(const Multiplication & how, const ExpertInputs & inputs);

} // namespace pyorch
