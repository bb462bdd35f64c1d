// The computation of a layer's experts for a row, read from llama.cpp's graph: the nodes from the experts' input to
// their outputs. They become a graph of our own, for any rows and without a decode (ExpertRecipe), and a second path
// through the experts, on a device (routing/device_chain.h).

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
        LEAF,    // a tensor without a node
        VIEW,    // [n, n_used, n_tokens] of another node's rows
        NODE,    // [n, n_used, n_tokens]
    };
    Kind          kind;
    ggml_tensor * tensor;
    int           sources[GGML_MAX_SRC]; // of a node or a view: earlier nodes, -1: none
    bool          by_experts;            // computed from products with the experts' matrices
    std::string   mixes;                 // why its rows depend on other rows of its sources, "" if they do not

    // Returns the offset of a view, in bytes of a row.
    size_t offset() const;
};

class ExpertGraph {
public:
    // Reads the graph from the experts' outputs back to the inputs.
    ExpertGraph(const llama_moe_route & route, int layer, ggml_tensor * outputs);

    const llama_moe_route & route;
    const int               layer; // index into the layers with experts

    std::vector<ExpertNode> nodes; // sources come before the nodes that use them; the last node gives the outputs

    bool is_inputs(const ggml_tensor * t) const;

    // Whether the node multiplies with the matrices of the layer's experts.
    bool is_experts(const ggml_tensor * t) const;

private:
    std::map<const ggml_tensor *, int> numbers;

    int         number_of(ggml_tensor * t);
    bool        has_slots(const ggml_tensor * t) const;
    std::string why_mixed(const ExpertNode & node) const;
};

// The computation of a layer's experts, stored beyond the life of a graph, so that rows can be computed without a
// decode (routing/expert_worker.h).
struct ExpertRecipe {
    // An ExpertNode for any number of slots: [n, 1, n_slots].
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

// The recipes of all layers of an engine. They use weights of the model that was loaded under it.
class ExpertRecipes {
public:
    // Stores the experts of a graph's layer. Returns "" if other servers can compute them, otherwise why they cannot.
    std::string learn(const ExpertGraph & graph);

    // Forgets a layer whose weights are freed. Waits for computations with them.
    void forget(int layer);

    // Calls use(const ExpertRecipe &) while the weights exist. Throws Failure for an unknown layer.
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
