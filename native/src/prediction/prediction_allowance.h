// How much of the processor's time predictions may take: a fiftieth of the time that passes, whatever they gain.
//
// It is spread evenly: while there is plenty, all layers that are asked for are predicted; when it runs short only the
// next one is, which is guessed best and costs least; when it is used up, none.

#pragma once

#include <algorithm>
#include <climits>

namespace pyorch {

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
