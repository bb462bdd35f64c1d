// The value of keeping each expert, learned online: how soon its layer will use it again.
//
// After a visit of a layer, for each of its experts e:
//
//     V = sigmoid(w . [log ema12, log ema48, log ema400, log age, W1, W2, W3, logit votes, 1] + b[e])
//
// ema_h: fading use counts with a half-life of h visits; age: visits since the last use; Wk: the sum of table k over
// the active rows j, at [j, e]. Active rows are the experts that the layer just used (first table), that the layer
// before used (second), and that this layer used one visit earlier (third). votes: of the tokens after the moments most
// like this one (moments.h). All experts share the weights w: where uses do not follow each other, the weights of the
// tables fall, and with them the noise of their sums.
//
// When the same context visits the layer again, V moves towards used + (1 - used) * DISCOUNT * V_new: the uses,
// discounted by their distance. If a visit does not continue the last one, as at the begin of a request, nothing moves:
// it does not follow from the past.
//
// A ubatch of several sequences is one visit, with the uses of all. All contexts share the counts and tables; each has
// its own last visit.
//
// Memory: three tables of n_expert x n_expert floats for each layer: 0.4 MB at 8 x 64, 9 MB at 48 x 128, 46 MB at 58 x
// 256; and at most about 2 MiB of moments. The loops are written for the compiler to vectorize, with the same
// arithmetic on every processor.

#pragma once

#include "residency/policies/moments.h"
#include "residency/policies/policy.h"

#include <array>
#include <unordered_map>

namespace pyorch {

class LearnedValue {
public:
    static constexpr int N_COUNTS  = 3;
    static constexpr int N_TABLES  = 3;
    static constexpr int N_ROWS    = N_COUNTS + 1 + N_TABLES + 1; // of features that differ by expert
    static constexpr int N_WEIGHTS = N_ROWS + 1;

    // n_used: by one token in one layer.
    LearnedValue(const std::vector<int> & n_experts, int n_used);

    void visit(const Visit & visit);
    void forget(const void * context); // it is gone

    // [n_expert] of each expert of a layer; only its visits change them.
    const std::vector<double> & values(int layer) const { return layers[layer].published; }

    // The learned state, for a file. Rows are n_expert wide, of the widest layer.
    struct State {
        std::vector<float> weights; // [2][N_WEIGHTS], and the sums of their squared gradients
        std::vector<float> counts;  // [n_layers][N_COUNTS][n_expert]
        std::vector<float> bias;    // [n_layers][n_expert]
        std::vector<float> tables;  // [n_layers][N_TABLES][n_expert][n_expert]

        std::vector<int32_t> moments, previous; // as Moments::export_tokens() gives them
    };

    State export_state() const;
    void  import_state(const State & state); // REQUIRES: the same sizes, finite, squares above 0, counts in 0..1

    const int n_layers;
    const int n_expert; // of the widest layer

    int n_moments() const { return moments.size(); }
    int n_moment_words() const { return moments.n_words(); }

private:
    using Row    = std::vector<float>;
    using Active = std::array<std::vector<int>, N_TABLES>; // by table

    // The last visit of a layer by a context, until it comes again.
    struct Past {
        bool                    known = false;
        std::array<Row, N_ROWS> features;
        Row                     value;
        Active                  active;
    };

    struct Layer {
        int                       n_expert;
        std::array<Row, N_COUNTS> counts;
        Row                       age;
        Row                       bias;
        std::vector<Row>          tables; // [n_expert][width] each
        std::vector<double>       published;
    };

    struct Passage {
        std::vector<Past> past;     // by layer
        std::vector<int>  previous; // experts of the layer that was visited last
    };

    const int                                 width; // of rows: n_expert and padding
    const int                                 n_used;
    std::array<float, N_WEIGHTS>              weights;
    std::array<float, N_WEIGHTS>              squares;
    std::vector<Layer>                        layers;
    std::unordered_map<const void *, Passage> passages; // by context
    std::array<Row, N_ROWS>                   features; // of the present visit
    Row                                       hit, logit, value, error;
    Moments                                   moments;
    Row                                       votes; // [words of a mask * 32]

    void look(Layer & layer, const Visit & visit, const Active & active);
    void teach(Layer & layer, const Past & past);
};

} // namespace pyorch
