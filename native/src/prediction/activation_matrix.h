// How often requests used each expert, searched for the past request most like the one at hand (MoE-Infinity).
//
// Matrices are alike by the cosine of their rows, each row divided by its sum, over the layers that the request at
// hand has counts of. As with expert maps they lie layer by layer, and a store may be shared.

#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace pyorch {

// What a search found. index -1: nothing, the store is empty or nothing in it has a direction.
struct Match {
    int      index      = -1;
    float    score      = 0; // cosine
    uint32_t generation = 0; // of the entry
};

// Of n floats each. Several sums side by side, so that compilers make vectors of them.
float dot(const float * a, const float * b, size_t n);

class ActivationMatrixStore {
public:
    ActivationMatrixStore(int n_layers, int n_expert, int capacity); // all at least 1

    const int n_layers;
    const int n_expert; // of the widest layer
    const int capacity;

    // counts [n_layers][n_expert] of a request. Into a full store it comes in place of the most alike entry. False, and
    // nothing is done, if a count is negative or not finite, or all are 0.
    bool add(const float * counts);

    // The entry most alike in the layers that have counts [n_layers][n_expert].
    Match nearest(const float * counts);

    int size() const;

    // The first n entries at most; counts [n][n_layers][n_expert] may be null. Returns how many there were.
    int copy_to(float * counts, int n) const;

    // probs [n]: the begin of the row of a layer, divided by its sum. False if that entry was replaced meanwhile.
    bool row(const Match & match, int layer, float * probs, int n) const;

private:
    friend class ActivationMatrixSearch;

    struct Layer {
        std::vector<float> rows;        // [size][n_expert] counts
        std::vector<float> inverse_sum; // [size] 0 where the sum is 0
        std::vector<float> squares;     // [size] of the row divided by its sum
    };

    mutable std::mutex    mutex;
    std::vector<Layer>    layers;
    std::vector<uint32_t> generation; // [size]
    uint64_t              changes = 0;
};

// One request on its way. Outlived by the store.
class ActivationMatrixSearch {
public:
    explicit ActivationMatrixSearch(ActivationMatrixStore & store);

    void begin(); // a new request

    // All of its counts [n_layers][n_expert].
    void set(const float * counts);

    // n uses of experts in a layer
    void count(int layer, const int32_t * experts, size_t n);

    // The past request most alike in the layers that were counted.
    Match nearest();

    // probs [n]: the begin of this request's own row, divided by its sum. False if that is 0.
    bool row(int layer, float * probs, int n) const;

    bool add(); // puts the request into the store: as ActivationMatrixStore::add

private:
    struct Layer {
        float              sum   = 0;
        bool               stale = true; // dots are older than the counts
        std::vector<float> dots;         // [size] with the stored rows, both divided by their sums
    };

    ActivationMatrixStore & store;
    std::vector<float>      counts; // [n_layers][n_expert]
    std::vector<Layer>      layers;
    uint64_t                changes = 0; // of the store, that dots have seen

    Match nearest_locked();
};

} // namespace pyorch
