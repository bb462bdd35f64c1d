// What the experts of a layer do with a row, as llama.cpp's graph says it: the nodes from the experts' input to their
// outputs. Of them a graph of its own is made, for any rows and without a decode (routing/expert_recipe.h), and a
// second way through the experts, on a device (routing/device_chain.h).

#pragma once

#include "ggml.h"

#include <map>
#include <string>
#include <vector>

struct llama_moe_route;

namespace pyorch {

struct ExpertNode {
    enum Kind : uint8_t {
        INPUTS,  // [n_in, 1, n_tokens]
        WEIGHTS, // [1, n_used, n_tokens]
        IDS,     // [n_used, n_tokens]
        LEAF,    // of no node
        VIEW,    // [n, n_used, n_tokens] of another node's rows
        NODE,    // [n, n_used, n_tokens]
    };
    Kind          kind;
    ggml_tensor * tensor;
    int           sources[GGML_MAX_SRC]; // of a node or a view: earlier nodes, -1: none
    bool          by_experts;            // made of what the experts' matrices give
    std::string   mixes;                 // why its rows are not made of the same rows of its sources, "" where they are

    // Of a view, in bytes of a row.
    size_t offset() const;
};

class ExpertGraph {
public:
    // Goes from the experts' outputs to the inputs.
    ExpertGraph(const llama_moe_route & route, int layer, ggml_tensor * outputs);

    const llama_moe_route & route;
    const int               layer; // index into the layers with experts

    std::vector<ExpertNode> nodes; // sources come before what is made of them; the last one gives the outputs

    bool is_inputs(const ggml_tensor * t) const;

    // Whether it multiplies with the matrices of the layer's experts.
    bool is_experts(const ggml_tensor * t) const;

private:
    std::map<const ggml_tensor *, int> numbers;

    int         number_of(ggml_tensor * t);
    bool        has_slots(const ggml_tensor * t) const;
    std::string why_mixed(const ExpertNode & node) const;
};

} // namespace pyorch
