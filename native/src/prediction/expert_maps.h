// Expert maps: the routing of past iterations, searched for the most similar one (FineMoE, sections 4.1 to 4.4).
//
// The maps are stored layer by layer, [n_layers][size][n_expert]. A search keeps the dot products of the layers so far,
// so the next layer costs one pass over size * n_expert consecutive numbers. Each row also stores 1 / norm of the map
// up to this layer, so that cosines need no other pass.
//
// A store may be shared; it locks itself. A replaced entry gets a new generation, by which a search notices that its
// sums belong to another iteration and computes them again.

#pragma once

#include "base/mutex.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyorch {

// The result of a search. index -1: none, because the store is empty or all its entries have the norm 0.
struct Match {
    int      index      = -1;
    float    score      = 0; // cosine
    uint32_t generation = 0; // of the entry
};

class ExpertMapStore {
public:
    // distance: of prefetching, d in the redundancy score. All sizes are at least 1, except n_embd: 0 means no
    // embeddings.
    ExpertMapStore(int n_layers, int n_expert, int n_embd, int capacity, int distance);

    const int n_layers;
    const int n_expert; // of the widest layer; rows of others end with zeros
    const int n_embd;
    const int capacity;
    const int distance;

    // Adds an iteration: embedding [n_embd], or null, and map [n_layers][n_expert]. In a full store it replaces the
    // entry with the highest redundancy score. Returns false, and does nothing, if a number is not finite.
    bool add(const float * embedding, const float * map);

    int size() const;

    // Copies at most the first n entries: embeddings [n][n_embd] and maps [n][n_layers][n_expert]; each may be null.
    // Returns the number of copied entries.
    int copy_to(float * embeddings, float * maps, int n) const;

    // Copies the beginning of a found entry's row of a layer to probs [n]. Returns false if the entry was replaced.
    bool row(const Match & match, int layer, float * probs, int n) const;

private:
    friend class ExpertMapSearch;

    struct Layer {
        std::vector<float> rows;         // [size][n_expert]
        std::vector<float> inverse_norm; // [size] of the layers up to this one, 0 if that norm is 0
    };

    mutable Mutex         mutex;
    std::vector<float>    embeddings GUARDED_BY(mutex);             // [size][n_embd]
    std::vector<float>    inverse_embedding_norm GUARDED_BY(mutex); // [size]
    std::vector<Layer>    layers GUARDED_BY(mutex);
    std::vector<uint32_t> generation GUARDED_BY(mutex); // [size]

    void put(size_t entry, const float * embedding, const float * map) REQUIRES(mutex);
};

// A search for one iteration, layer by layer. REQUIRES: the store outlives it.
class ExpertMapSearch {
public:
    explicit ExpertMapSearch(ExpertMapStore & store);

    // Begins an iteration with its embedding [n_embd], or null. Returns the entry with the most similar embedding (eq.
    // 4).
    Match begin(const float * embedding);

    // Adds the distribution of the next layer, [n] with n up to n_expert. Returns the entry that is most similar in all
    // observed layers (eq. 5). REQUIRES: n_known() < n_layers.
    Match observe(const float * probs, int n);

    int n_known() const { return known; } // layers observed

    // Adds the iteration to the store, as ExpertMapStore::add does. REQUIRES: n_known() == n_layers.
    bool add();

private:
    ExpertMapStore &      store;
    int                   known = 0;
    std::vector<float>    embedding; // [n_embd]
    std::vector<float>    map;       // [n_layers][n_expert]
    double                embedding_squares = 0;
    double                squares           = 0; // of the layers observed
    std::vector<float>    semantic;              // [size] dot products of embeddings
    std::vector<float>    trajectory;            // [size] dot products of the layers observed
    std::vector<uint32_t> generation;            // [size] of what these were made with

    void  refresh() REQUIRES(store.mutex);
    Match best(const std::vector<float> & dots, const std::vector<float> & inverse_norm, double own_squares) const
        REQUIRES(store.mutex);
};

} // namespace pyorch
