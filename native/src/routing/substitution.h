// Another expert in place of an absent one (BuddyMoE, section 3.1 and algorithm 1). Lossy, off by default.
//
// Between router and experts, token by token, the gates in the paper's order: token activating entropy
// (eq. 1) and probability margin, the share of absent experts in the micro-batch (eq. 2; substitute/gates.h), the order
// of its slots (substitute/order.h), then the choice of a buddy by priority (eq. 3; substitute/choose.h), and what that
// makes of its weights (substitute/account.h). Nothing here knows of llama.cpp or of the residency table: what is
// resident comes in as a mask, so the same routing with the same mask always ends alike.

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

// resident: [n_expert], 0 for absent experts; else 1 + the hops to the expert, which another server may compute. Returns
// what was done.
// mean_weight: of an expert of a token. ghosts: null where there are none, and then none computes.
pyorch_substitution_counts substitute(const pyorch_substitution & settings, double mean_weight,
    const BuddyLists & lists, const GhostLayer * ghosts, RoutedBatch & batch, const uint8_t * resident);

// Chooses beta (eq. 2) by what a layer waits for: while its ubatches read more than a budget on average, beta rises, and
// more is replaced (section 3.1, "a running bandwidth meter").
class AdaptiveBeta {
public:
    // An ubatch read so many bytes. Returns beta for the next one.
    double next(double bytes_read, double budget);

private:
    double beta       = 0;
    double mean_bytes = 0; // of so many ubatches
    double n_ubatches = 0;
};

// What the layers of one engine do with absent experts.
class Substitutions {
public:
    explicit Substitutions(int n_layers) : modes(n_layers), layers(n_layers) {}

    void set(int layer, const pyorch_substitution & settings);
    void set_buddies(int layer, BuddyLists lists);
    void set_ghosts(int layer, std::shared_ptr<const GhostLayer> ghosts);

    // Null: none were set.
    std::shared_ptr<const GhostLayer> ghosts(int layer);

    // Exactly these experts count as resident; empty: those that are.
    void set_cache(int layer, std::vector<uint8_t> mask);

    // Whether substitution may touch this layer of an ubatch. Does not lock.
    bool active(int layer, bool decode) const {
        const int mode = modes[layer].load(std::memory_order_relaxed);
        return mode == ALWAYS || (mode == DECODE && decode);
    }

    // Any layer of any ubatch.
    bool active() const {
        return std::any_of(modes.begin(), modes.end(), [](const std::atomic<int> & mode) { return mode != NEVER; });
    }

    // What settings that may touch a layer go by, beside the weights of the chosen experts: what the router says of all
    // experts, and what it sees, from which ghosts compute.
    struct Seen {
        bool probs  = false;
        bool logits = false;
        bool inputs = false;
    };
    Seen seen() const;

    // Nothing where the settings came after the graph was made, and it has not what they go by.
    // resident: the real residency, beside which what was forecast counts as there. loading: [n_expert], nonzero for
    // those that are on their way. expert_bytes: of one expert of the layer.
    void apply(RoutedBatch & batch, const uint8_t * resident, const uint8_t * loading, uint64_t expert_bytes);

    // As apply, but counts nothing, and beta stays.
    pyorch_substitution_counts preview(RoutedBatch & batch, const uint8_t * resident);

    pyorch_substitution_counts counts(int layer);
    void                       reset_counts();

private:
    enum Active { NEVER, DECODE, ALWAYS }; // NEVER is 0, as modes begin

    // Of an expert of a token, in all layers since settings were set: what max_weight is a multiple of. A layer whose
    // experts all weigh little adds little, and what is left out there is missed less.
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
