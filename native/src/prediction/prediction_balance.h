// Whether predicting is worth its time, by what is counted anyway: the processor's time that it took, and the reading
// that its guesses spared the layers.
//
// The thread that predicts may take a processor from a compute thread, so its time counts in full. A hundredth of the
// time that layers wait for experts is never too much: then predicting costs no more than that if it saves nothing at
// all.

#pragma once

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

} // namespace pyorch
