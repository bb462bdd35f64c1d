// Whether predicting is worth its time, by what is counted anyway: the processor's time that it took, and the reading
// that its guesses spared the layers.
//
// The thread that predicts may take a processor from a compute thread, so its time counts in full. A hundredth of the
// time that layers wait for experts is never too much: then predicting costs no more than that if it saves nothing at
// all.

#pragma once

#include <algorithm>
#include <climits>

namespace pyorch {

class PredictionBalance {
public:
    bool pays() const { return worth > cost; }

    // Of one decoding ubatch, in seconds: reading of what was absent or would have been but for guesses; of that, what
    // guesses had read by then; and the processor's time for predictions.
    void add(double absent, double saved, double spent);

private:
    double absent = -1;     // means, fading; -1: nothing is known
    double yield  = 0.2;    // of the absent, what guesses save
    double cost   = 100e-6; // of the predictions of an ubatch
    double worth  = 0;
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
