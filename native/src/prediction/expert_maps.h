// What routers decided in past iterations, searched for what is most like the iteration at hand (FineMoE, sections
// 4.1 to 4.4).
//
// The maps lie layer by layer, [n_layers][size][n_expert], and a search keeps the dot products of the layers that it
// was shown: the next layer costs one pass over size * n_expert numbers that lie one after another. Beside each row
// lies 1 / norm of the map up to it, so that cosines need no other pass.
//
// A store may be shared: it locks for itself. An entry that is replaced gets a new generation, by which a search
// notices that its sums are those of another iteration and makes them anew.

#pragma once

#include "base/mutex.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyorch {

// What a search found. index -1: nothing, the store is empty or nothing in it has a direction.
struct Match {
    int      index      = -1;
    float    score      = 0; // cosine
    uint32_t generation = 0; // of the entry
};

class ExpertMapStore {
public:
    // distance: of prefetching, d in the redundancy score. All at least 1, but n_embd may be 0: no embeddings.
    ExpertMapStore(int n_layers, int n_expert, int n_embd, int capacity, int distance);

    const int n_layers;
    const int n_expert; // of the widest layer; rows of others end with zeros
    const int n_embd;
    const int capacity;
    const int distance;

    // An iteration: embedding [n_embd], or null, and map [n_layers][n_expert]. Into a full store it comes in place of
    // the entry with the highest redundancy score. False, and nothing is done, if a number is not finite.
    bool add(const float * embedding, const float * map);

    int size() const;

    // The first n entries at most: embeddings [n][n_embd] and maps [n][n_layers][n_expert], each may be null. Returns
    // how many there were.
    int copy_to(float * embeddings, float * maps, int n) const;

    // probs [n]: the begin of the row of a layer, by what a search found. False if that entry was replaced meanwhile.
    bool row(const Match & match, int layer, float * probs, int n) const;

private:
    friend class ExpertMapSearch;

    struct Layer {
        std::vector<float> rows;         // [size][n_expert]
        std::vector<float> inverse_norm; // [size] of the layers up to this one, 0 where that norm is 0
    };

    mutable Mutex         mutex;
    std::vector<float>    embeddings GUARDED_BY(mutex);             // [size][n_embd]
    std::vector<float>    inverse_embedding_norm GUARDED_BY(mutex); // [size]
    std::vector<Layer>    layers GUARDED_BY(mutex);
    std::vector<uint32_t> generation GUARDED_BY(mutex); // [size]

    void put(size_t entry, const float * embedding, const float * map) REQUIRES(mutex);
};

// One iteration on its way through the layers. Outlived by the store.
class ExpertMapSearch {
public:
    explicit ExpertMapSearch(ExpertMapStore & store);

    // A new iteration, with its embedding [n_embd], or null. The entry with the most alike embedding (eq. 4).
    Match begin(const float * embedding);

    // The distribution of the next layer, [n] with n up to n_expert. REQUIRES: n_known() < n_layers. The entry most
    // alike in all layers that were observed (eq. 5).
    Match observe(const float * probs, int n);

    int n_known() const { return known; } // layers observed

    // Puts the iteration into the store. REQUIRES: n_known() == n_layers. As ExpertMapStore::add.
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
