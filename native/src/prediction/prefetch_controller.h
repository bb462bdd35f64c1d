// Whether prefetching pays, found out by trying: token times with it and without it, in turns.
//
// A prefetch can lose: on a disk that is busy anyway, from a page cache that answers at once, or on cores that
// have no time for it. It mostly gains, so it begins on, and is compared after a while. The loser of the last
// comparison is tried again, ever more rarely while it goes on losing, and at once when the winner's own times change.

#pragma once

namespace pyorch {

class PrefetchController {
public:
    bool on() const { return mode == ON; }

    // The time of one token, in seconds, with what on() said before. A pause between requests is not one.
    void token(double seconds);

private:
    enum Mode { OFF, ON };

    struct Times {
        double mean  = 0; // of a token, fading; 0: never measured
        double sum   = 0; // of the phase at hand
        int    n     = 0;
    };

    static constexpr int FIRST_RUN = 192; // short answers are done before anything is tried

    Mode  mode     = ON;
    bool  trial    = false; // this phase is to find out, else to make use of what was found
    int   seen     = 0;     // tokens in this phase
    int   run      = FIRST_RUN; // tokens of a phase that is no trial
    Times times[2];

    void begin(Mode next, bool as_trial);
    void close_phase();
};

} // namespace pyorch
