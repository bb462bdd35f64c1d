// Which experts tokens used after moments that were like the present one.
//
// A moment is a token at a layer. Its window is the last n_layers visits of its context, as bit masks of the experts that
// they used. Two moments of a layer are as alike as their windows have uses in common. The most alike ones of the stored
// tokens vote for the experts that the tokens behind them used: a vote counts exp(likeness / TAU), a use h tokens later
// DISCOUNT^h.
//
// A text repeats earlier moments, so what followed them says what comes many tokens ahead.

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

    // After a context's visit of a layer: sums [n_expert] become the votes, as a multiple of what experts that are all
    // used alike would get. False: nothing is known, sums stay as they are.
    bool votes(const void * context, int layer, float * sums) const;

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
        int                token = -1; // that passes the layers now
        int                layer = 0;  // of the last visit
        int                searched;   // at this layer
        std::vector<Match> matches = {};
    };

    const int             n_layers;
    const int             words; // of a layer's mask
    const int             layers_a_search;
    const float           share;    // of uniform votes
    std::vector<uint32_t> masks;    // [size][n_layers][words]
    std::vector<int32_t>  previous; // [size] places of the tokens before and behind in their context, or -1
    std::vector<int32_t>  next;
    int                   newest = -1; // place

    std::vector<float>                        likeness_weight; // by how much less alike than the most alike
    std::vector<float>                        discounts;       // by tokens
    std::vector<int32_t>                      common;          // by place: of a search
    std::vector<int32_t>                      histogram;
    std::unordered_map<const void *, Passage> passages; // by context

    uint32_t *       mask(int token, int layer) { return masks.data() + ((size_t) token * n_layers + layer) * words; }
    const uint32_t * mask(int token, int layer) const { return const_cast<Moments *>(this)->mask(token, layer); }

    int  take_place();
    void search(Passage & passage);
};

} // namespace pyorch
