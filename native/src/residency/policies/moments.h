// Which experts tokens used after moments that were like the present one.
//
// A moment is a token at a layer. Its window is the last n_layers visits of its context, as bit masks of the experts
// that they used. Two moments of a layer are as alike as their windows have uses in common. A search finds the most
// alike moments of the stored tokens. Their weights are exp(likeness / TAU), with a sum of 1.
//
// The tokens behind a moment vote. The vote for an expert is DISCOUNT^h if the h-th token behind the moment is the
// first that uses the expert. So the sum of the votes estimates the value that `learned` gives an expert. One search is
// noisy. So the moments of earlier searches go on voting, with weights that fade.
//
// A text repeats earlier moments. The tokens behind them show which experts come many tokens ahead.

#pragma once

#include "residency/policies/policy.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace pyorch {

class Moments {
public:
    // n_expert: of the widest layer. n_used: by one token in one layer.
    Moments(int n_layers, int n_expert, int n_used);

    void visit(const Visit & visit);
    void forget(const void * context); // it is gone; its tokens stay

    // After a context's visit of a layer: sums [n_words() * 32] become the votes, from 0 to 1. False: no moment votes,
    // and sums keep their values.
    bool votes(const void * context, int layer, float * sums);

    // The stored tokens for a file, the oldest first. masks: [n][n_layers][n_words()]; previous: [n] the index of the
    // token before, -1 for none.
    void export_tokens(std::vector<int32_t> & masks, std::vector<int32_t> & previous) const;

    // REQUIRES: previous[i] is from -1 to i - 1, each index but -1 at most once
    void import_tokens(const std::vector<int32_t> & masks, const std::vector<int32_t> & previous);

    int size() const { return (int) next.size(); } // tokens stored
    int n_words() const { return words; }

    const int capacity; // tokens

private:
    struct Match {
        int   token; // its place
        float weight;
    };

    // Of a context.
    struct Passage {
        int                token = -1;  // that passes the layers now
        int                layer = 0;   // of the last visit
        int                searched;    // at this layer
        std::vector<Match> voters = {}; // moved on with the token
    };

    const int             n_layers;
    const int             words; // of a layer's mask
    const int             layers_a_search;
    std::vector<uint32_t> masks;    // [size][n_layers][words]
    std::vector<int32_t>  previous; // [size] places of the tokens before and behind in their context, or -1
    std::vector<int32_t>  next;
    int                   newest = -1; // place

    std::vector<float>                        likeness_weight; // by how much less alike than the most alike
    std::vector<float>                        discounts;       // by tokens
    std::vector<uint32_t>                     window;          // of a search
    std::vector<uint32_t>                     used_before;     // by the tokens of a voter that have voted
    std::unordered_map<const void *, Passage> passages;        // by context

    uint32_t *       mask(int token, int layer) { return masks.data() + ((size_t) token * n_layers + layer) * words; }
    const uint32_t * mask(int token, int layer) const { return const_cast<Moments *>(this)->mask(token, layer); }

    int  take_place();
    void move_on(Passage & passage) const;
    void search(Passage & passage);

    std::vector<Match> most_alike(const Passage & passage);
};

} // namespace pyorch
