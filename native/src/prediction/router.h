// How a layer chooses its experts: what llama.cpp's build_moe_ffn was given, and the same arithmetic for predictors.

#pragma once

#include "base/mutex.h"

#include "pyorch.h"

#include <string>
#include <vector>

namespace pyorch {

// As the API has it. The arrays are the model's own, or those of Routers::set_copy.
struct Router : pyorch_router {
    Router() : pyorch_router{} {
        gating   = PYORCH_GATING_SOFTMAX;
        n_groups = n_groups_used = 1;
        scale                    = 1;
    }
    explicit Router(const pyorch_router & given) : pyorch_router(given) {}

    explicit operator bool() const { return gate != nullptr; }
};

bool known(int32_t gating);

// What a router makes of the logits of one token.
struct Choice {
    std::vector<int>   experts;     // the best first: the n_used that it selects, then those that come next
    std::vector<float> weights;     // [n_used] of the output of those that it selects
    std::vector<float> probability; // [n_expert] with the sum 1
};

// n_experts: how many are named at most; those of groups that do not count never are.
// REQUIRES: known(router.gating)
Choice choose(const Router & router, const std::vector<float> & logits, int n_experts);

// Makes of probabilities as the graph has them, of which those of SOFTMAX_SELECTED are logits, such with the sum 1.
void make_distribution(int32_t gating, float * probs, int n_expert);

// The indices of the n largest values, largest first, the lower index among equals.
std::vector<int> top(const float * values, int n_values, int n);

// The routers of the layers of one engine, as graphs last had them. Locks for itself.
class Routers {
public:
    explicit Routers(int n_layers) : entries(n_layers) {}

    // model: tells the models of an engine apart, see forget(). why: of a layer whose router cannot be applied, which
    // is an empty one then, the reason in a sentence.
    void set(int layer, const Router & router, const void * model, std::string why = "");

    // Copies the arrays. model: whose they are, null: no model's.
    void set_copy(int layer, const Router & router, const void * model = nullptr);

    // Whether that was done for this model.
    bool has_copy(int layer, const void * model) const;

    // The arrays of a model go. Whether there were any.
    bool forget(const void * model);

    std::vector<Router> all() const; // by layer, empty ones where there is none

    // Why a router of a graph cannot be applied; "" where all can, or no graph was built yet.
    std::string unknown() const;

private:
    struct Entry {
        Router             router;
        std::string        why;
        const void *       model = nullptr;
        std::vector<float> gate, bias, selection_bias, norm; // copies
    };

    mutable Mutex      mutex;
    std::vector<Entry> entries GUARDED_BY(mutex);
};

} // namespace pyorch
