// Whether decoding is sooner with predictions, by trial: a quota of the disk, interrupts, a busy core and the time of
// predicting take from what guesses gain, and no account has that.
//
// Some ubatches decode with, as many without, in pairs of such blocks, the first of which alternates. A block also
// takes longer where more of its experts were absent, which is chance nearly all: the line that pairs follow (how much
// longer, by how much more was absent) tells what is left where as much was. What wrong guesses displace is absent more
// often and so in no account here; what a guess must gain has it (Table::break_even). From FEWEST_PAIRS on, when that
// tells which is sooner or that a gain is unlikely, or after MOST_PAIRS, the sooner is kept for HELD ubatches, and for
// twice as many as the last time where the trial after them ends as before.

#pragma once

namespace pyorch {

class PredictionTrial {
public:
    static constexpr int BLOCK = 4, FEWEST_PAIRS = 4, MOST_PAIRS = 24, HELD = 512, MOST_HELD = 8192;

    // Whether the next decoding ubatch is to be predicted.
    bool on() const { return trying() ? on_in(block) : kept; }

    // seconds: from the beginning of such a ubatch to that of the next; 0: something else was in between. absent: bytes
    // of the experts that were absent, or would have been but for guesses.
    void add(double seconds, double absent);

private:
    struct Block {
        double seconds = 0;
        double absent  = 0;
    };

    bool   kept  = true;
    int    left  = 16; // ubatches until the next trial: a cold start is no time to try
    int    held  = HELD / 2;
    int    block = 0;
    int    n     = 0; // ubatches in the block
    Block  sum;       // of them
    Block  first;     // the block before, which is of the same pair
    double usual = 0; // seconds of a ubatch in the blocks so far

    // Of pairs, without compared with: by how much longer, and how much more was absent; means, and sums of products of
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
