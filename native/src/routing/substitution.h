// Replacement of absent experts (BuddyMoE, section 3.1 and algorithm 1). Lossy, off by default.
//
// Between router and experts, for each token, in the paper's order: the gates by token activating entropy (eq. 1),
// probability margin, and the share of absent experts in the micro-batch (eq. 2; substitute/gates.h); the order of its
// slots (substitute/order.h); the choice of a buddy by priority (eq. 3; substitute/choose.h); and the new weights
// (substitute/account.h). This code does not know llama.cpp or the residency table: the resident experts are a mask, so
// the same routing with the same mask always gives the same result.

#pragma once

#include "pyorch.h"
#include "base/mutex.h"
#include "routing/ghosts.h"
#include "routing/substitute/choose.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace pyorch {

// Treats the absent experts of a batch and returns counts. resident: [n_expert], 0 for absent experts; otherwise 1 +
// the hops to the expert, which another server may compute. mean_weight: of an expert of a token. ghosts: null for
// none; then none computes.
pyorch_substitution_counts substitute(const pyorch_substitution & settings, double mean_weight,
    const BuddyLists & lists, const GhostLayer * ghosts, RoutedBatch & batch, const uint8_t * resident);

// Adapts beta (eq. 2) to the bytes that a layer waits for: while its ubatches read more than a budget on average, beta
// rises, and more is replaced (section 3.1, "a running bandwidth meter").
class AdaptiveBeta {
public:
    // Adds the bytes that a ubatch read. Returns beta for the next one.
    double next(double bytes_read, double budget);

private:
    double beta       = 0;
    double mean_bytes = 0; // over n_ubatches
    double n_ubatches = 0;
};

// The settings of absent experts of one engine's layers, with their counts.
class Substitutions {
public:
    explicit Substitutions(int n_layers) : modes(n_layers), layers(n_layers) {}

    void set(int layer, const pyorch_substitution & settings);
    void set_buddies(int layer, BuddyLists lists);
    void set_ghosts(int layer, std::shared_ptr<const GhostLayer> ghosts);

    // Returns the ghosts of a layer, or null.
    std::shared_ptr<const GhostLayer> ghosts(int layer);

    // Treats exactly these experts as resident; empty: the really resident ones.
    void set_cache(int layer, std::vector<uint8_t> mask);

    // Whether substitution may change this layer of a ubatch. Does not lock.
    bool active(int layer, bool decode) const {
        const int mode = modes[layer].load(std::memory_order_relaxed);
        return mode == ALWAYS || (mode == DECODE && decode);
    }

    // The same for any layer of any ubatch.
    bool active() const {
        return std::any_of(modes.begin(), modes.end(), [](const std::atomic<int> & mode) { return mode != NEVER; });
    }

    // Data that active settings need in addition to the weights of the chosen experts: the router's values for all
    // experts, and its input, from which ghosts compute.
    struct Seen {
        bool probs  = false;
        bool logits = false;
        bool inputs = false;
    };
    Seen seen() const;

    // Applies the settings. Does nothing if they were set after the graph was built and it lacks their data.
    // resident: the real residency; forecast experts also count as resident. loading: [n_expert], nonzero for loading
    // experts. expert_bytes: of one expert of the layer.
    void apply(RoutedBatch & batch, const uint8_t * resident, const uint8_t * loading, uint64_t expert_bytes);

    // The same without counting, and without a change of beta.
    pyorch_substitution_counts preview(RoutedBatch & batch, const uint8_t * resident);

    pyorch_substitution_counts counts(int layer);
    void                       reset_counts();

private:
    enum Active { NEVER, DECODE, ALWAYS }; // NEVER is 0, the first value of modes

    // Mean weight of an expert of a token, in all layers since settings were set; max_weight is relative to it. A layer
    // whose experts all have small weights adds little to the output, and loses little by omissions.
    struct MeanWeight {
        double   sum = 0;
        uint64_t n   = 0;

        void   add(const RoutedBatch & batch);
        double value() const { return sum / (double) n; }
    };

    struct Layer {
        pyorch_substitution               settings = pyorch_default_substitution;
        BuddyLists                        lists;
        std::shared_ptr<const GhostLayer> ghosts;
        std::vector<uint8_t>              cache;
        AdaptiveBeta                      adaptive;
        pyorch_substitution_counts        counts = {};
    };

    std::vector<std::atomic<int>> modes; // Active, by layer

    mutable Mutex      mutex;
    std::vector<Layer> layers GUARDED_BY(mutex);
    MeanWeight         mean_weight GUARDED_BY(mutex);
};

} // namespace pyorch
