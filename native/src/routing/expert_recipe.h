// What the experts of a layer do with a row, as llama.cpp's graph says it: the nodes from the experts' input to their
// outputs. Of them a graph of its own can be made, for any rows and without a decode: routing/expert_worker.h.

#pragma once

#include "ggml.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

struct llama_moe_route;

namespace pyorch {

struct ExpertRecipe {
    enum Kind : uint8_t {
        INPUTS,  // [n_in, 1, n_slots]
        WEIGHTS, // [1, 1, n_slots]
        IDS,     // [1, n_slots]
        LEAF,    // a weight of the model
        VIEW,    // [n, 1, n_slots] of another step
        NODE,    // [n, 1, n_slots]
    };
    struct Step {
        Kind             kind                                         = NODE;
        ggml_tensor *    leaf                                         = nullptr;
        ggml_op          op                                           = GGML_OP_NONE;
        ggml_type        type                                         = GGML_TYPE_F32;
        int64_t          n                                            = 0;
        size_t           offset                                       = 0; // of a view, in bytes of a row
        int32_t          params[GGML_MAX_OP_PARAMS / sizeof(int32_t)] = {};
        std::vector<int> sources                                      = {}; // earlier steps; -1: none
    };
    std::vector<Step> steps; // the last one gives the outputs
};

// Whether an operation that is no multiplication computes each row of its outputs from the same row of its sources.
bool works_row_by_row(ggml_op op);

// Of all layers of an engine. The weights that they name are those of the model that was loaded under it.
class ExpertRecipes {
public:
    // The experts' outputs are in a graph. Returns whether other servers can compute them: "", or why they cannot.
    std::string learn(int layer, const llama_moe_route & route, const ggml_tensor * experts);

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
