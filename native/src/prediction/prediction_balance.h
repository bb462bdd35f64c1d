// Whether predicting is worth its time, by what is counted anyway: the processor's time that it took, and the reading
// that its guesses spared the layers.
//
// The thread that predicts may take a processor from a compute thread, so its time counts in full. A hundredth of the
// time that layers wait for experts is never too much: then predicting costs no more than that if it saves nothing at
// all.

#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

namespace pyorch {

class PredictionBalance {
public:
    bool pays() const { return worth > cost; }

    // Of one decoding ubatch, in seconds: reading of what was absent or would have been but for guesses; of that, what
    // guesses had read by then; and the processor's time for predictions. predicted: whether they were made.
    void add(double absent, double saved, double spent, bool predicted);

private:
    double absent = -1;     // means, fading; -1: nothing is known
    double yield  = 0.2;    // of the absent, what guesses save
    double cost   = 100e-6; // of the predictions of an ubatch
    double worth  = 0;
};

// Whether decoding is sooner with predictions, by trial: what a quota of the disk, interrupts or a busy core take from
// what a guess gains is in no account.
//
// Some ubatches decode with, as many without, in pairs of such blocks, the first of which alternates. A block also
// takes longer where more of its experts were absent, which is chance nearly all: the line that pairs follow (how much
// longer, by how much more was absent) tells what is left where as much was. What wrong guesses displace is absent more
// often and so in no account here; what a guess must gain has it (Table::break_even). From FEWEST_PAIRS on, when that
// tells which is sooner or that a gain is unlikely, or after MOST_PAIRS, the sooner is kept for HELD ubatches, and for
// twice as many as the last time where the trial after them ends as before.
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

// How much of the processor's time predictions may take: a fiftieth of the time that passes, whatever they gain.
//
// It is spread evenly: while there is plenty, all layers that are asked for are predicted; when it runs short only the
// next one is, which is guessed best and costs least; when it is used up, none.
class PredictionAllowance {
public:
    static constexpr double SHARE = 0.02;

    // Layers ahead that may be predicted now; 0: none. now: seconds of a clock that only goes forward.
    int reach(double now) {
        left = std::min(MOST, left + SHARE * std::max(0.0, now - last));
        last = std::max(last, now);
        return left <= 0 ? 0 : left < MOST / 2 ? 1 : INT_MAX;
    }

    // Seconds of a processor that a prediction took.
    void spend(double seconds) { left -= seconds; }

private:
    static constexpr double MOST = SHARE * 0.1; // seconds that can be saved up: what a tenth of a second gives

    double last = 0;
    double left = MOST;
};

} // namespace pyorch
