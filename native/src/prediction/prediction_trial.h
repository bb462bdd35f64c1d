// Decides by trial whether decoding is faster with predictions. A quota of the disk, interrupts, a busy core and the
// time of predicting reduce the gain of guesses, and no counter contains them.
//
// Some ubatches decode with predictions and as many without, in pairs of such blocks with alternating order. A block
// also takes longer if more of its experts were absent, mostly by chance: the line through the pairs (how much longer,
// by how much more was absent) shows the rest at equal absence. Experts that wrong guesses displace are absent more
// often, which this comparison hides; Table::break_even counts them instead. From FEWEST_PAIRS on, the trial ends when
// it shows which side is faster or that a gain is unlikely, and at the latest after MOST_PAIRS. The faster side is kept
// for HELD ubatches, and for twice as many as the last time if the next trial ends alike.

#pragma once

namespace pyorch {

class PredictionTrial {
public:
    static constexpr int BLOCK = 4, FEWEST_PAIRS = 4, MOST_PAIRS = 24, HELD = 512, MOST_HELD = 8192;

    // Whether the next decoding ubatch is to be predicted.
    bool on() const { return trying() ? on_in(block) : kept; }

    // seconds: from the beginning of such a ubatch to the beginning of the next; 0: other work was in between. absent:
    // bytes of experts that were absent, or would have been without guesses.
    void add(double seconds, double absent);

private:
    struct Block {
        double seconds = 0;
        double absent  = 0;
    };

    bool   kept  = true;
    int    left  = 16; // ubatches until the next trial: a cold start would distort it
    int    held  = HELD / 2;
    int    block = 0;
    int    n     = 0; // ubatches in the block
    Block  sum;       // over these ubatches
    Block  first;     // the first block of the pair
    double usual = 0; // seconds of a ubatch in the blocks so far

    // Over pairs, with against without: how much longer, and how much more was absent; means, and sums of products of
    // the distances from these.
    struct Pairs {
        int    n      = 0;
        double longer = 0, more = 0;
        double longer_longer = 0, longer_more = 0, more_more = 0;
    } pairs;

    bool        trying() const { return left == 0; }
    static bool on_in(int block) { return (block + 1) / 2 % 2 == 0; }
    void        add_pair(const Block & with, const Block & without);
};

} // namespace pyorch
