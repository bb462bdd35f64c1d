// What is kept of a layer's experts in a graph (routing/expert_graph.h) when the graph is gone: so that rows can be
// computed without a decode (routing/expert_worker.h).

#pragma once

#include "routing/expert_graph.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

namespace pyorch {

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
        std::shared_lock<std::shared_mutex> lock(mutex);
        use(known(layer));
    }

private:
    std::shared_mutex           mutex;
    std::map<int, ExpertRecipe> recipes; // by layer

    const ExpertRecipe & known(int layer) const;
};

} // namespace pyorch
