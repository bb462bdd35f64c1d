// What the experts of a layer do with a row, as llama.cpp's graph says it: the nodes from the experts' input to their
// outputs. Of them a graph of its own is made, for any rows and without a decode (ExpertRecipe), and a
// second way through the experts, on a device (routing/device_chain.h).

#pragma once

#include "base/mutex.h"

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

// What is kept of a layer's experts in a graph when the graph is gone: so that rows can be computed without a decode
// (routing/expert_worker.h).
struct ExpertRecipe {
    // As an ExpertNode, of any number of slots: [n, 1, n_slots].
    struct Step {
        ExpertNode::Kind kind;
        ggml_tensor *    leaf                                         = nullptr; // a weight of the model
        ggml_op          op                                           = GGML_OP_NONE;
        ggml_type        type                                         = GGML_TYPE_F32;
        int64_t          n                                            = 0;
        size_t           offset                                       = 0; // of a view
        int              sources[GGML_MAX_SRC]                        = {};
        int32_t          params[GGML_MAX_OP_PARAMS / sizeof(int32_t)] = {};
    };
    std::vector<Step> steps; // the last one gives the outputs
};

// Of all layers of an engine. The weights that they name are those of the model that was loaded under it.
class ExpertRecipes {
public:
    // A graph computes the experts of its layer. Returns whether other servers can: "", or why they cannot.
    std::string learn(const ExpertGraph & graph);

    // The weights of the layer go. Waits for who computes with them.
    void forget(int layer);

    // Calls use(const ExpertRecipe &), for as long as the weights stay. Throws Failure where nothing is known.
    template <typename Use>
    void with(int layer, Use use) {
        ReadLock lock(mutex);
        use(known(layer));
    }

private:
    SharedMutex                 mutex;
    std::map<int, ExpertRecipe> recipes GUARDED_BY(mutex); // by layer

    const ExpertRecipe & known(int layer) const REQUIRES_SHARED(mutex);
};

} // namespace pyorch
