// How a layer chooses its experts: the arguments of llama.cpp's build_moe_ffn, and the same arithmetic for predictors.

#pragma once

#include "base/mutex.h"

#include "pyorch.h"

#include <string>
#include <vector>

namespace pyorch {

// A router as in the API. The arrays belong to the model, or to Routers::set_copy.
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

// The choice of a router for one token.
struct Choice {
    std::vector<int>   experts;     // the best first: the n_used selected ones, then the next ones
    std::vector<float> weights;     // [n_used] of the outputs of the selected ones
    std::vector<float> probability; // [n_expert] with the sum 1
};

// Chooses experts. n_experts: the most that it names; it never names experts of groups that were not selected.
// REQUIRES: known(router.gating)
Choice choose(const Router & router, const std::vector<float> & logits, int n_experts);

// Turns a graph's probabilities (for SOFTMAX_SELECTED logits) into a distribution with the sum 1.
void make_distribution(int32_t gating, float * probs, int n_expert);

// Returns the indices of the n largest values, largest first, the lower index among equals.
std::vector<int> top(const float * values, int n_values, int n);

// The routers of one engine's layers, as its last graphs had them. Locks itself.
class Routers {
public:
    explicit Routers(int n_layers) : entries(n_layers) {}

    // model: identifies the models of an engine, see forget(). why: for a router that cannot be applied, which is then
    // empty, the reason in a sentence.
    void set(int layer, const Router & router, const void * model, std::string why = "");

    // Copies the arrays. model: their owner, null: no model.
    void set_copy(int layer, const Router & router, const void * model = nullptr);

    // Whether set_copy() was called for this model.
    bool has_copy(int layer, const void * model) const;

    // Forgets the arrays of a model. Returns whether there were any.
    bool forget(const void * model);

    std::vector<Router> all() const; // by layer, empty for an unknown router

    // Returns why a router of a graph cannot be applied; "" if all can, or no graph was built yet.
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
