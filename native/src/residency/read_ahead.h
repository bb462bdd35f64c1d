// Reading ahead: what is to be read before a layer needs it, and what becomes of it.
//
// Four kinds, in this order: experts that were ordered by name, the next layer of a prompt, guesses, and experts that
// others just stood in for. None of them has memory until a reader has nothing better to do; guesses and what is
// deferred get it only when no reader has anything to do, and take it from no expert that was used in its layer's last
// pass. A guess whose pass went without it is abandoned: the request under way ends, and no other is begun.

#pragma once

#include "residency/guesses.h"
#include "residency/room.h"

#include <deque>
#include <unordered_map>
#include <vector>

namespace pyorch {

class ReadAhead {
public:
    struct Want {
        int    expert;
        double probability;
        bool   wanted; // in: read it, if it is absent
        bool   absent; // out
    };

    ReadAhead(Residents & residents, Room & room, Loader & loads) :
            residents(residents), room(room), loads(loads), forecast_for(residents.n_layers()) {}

    // Start the load of an expert, if there is one and memory for it.
    bool start_order(const Locked & locked) { return next(locked, ordered, false) || next(locked, prompt, true); }
    bool start_guess(const Locked & locked) { return next_guess(locked) || next_deferred(locked); }

    bool is_idle() const { return ordered.empty() && prompt.empty() && guesses.empty() && deferred.empty(); }

    void order_by_name(Expert & e) { ordered.push_back(&e); }
    void order_first(Expert & e) { ordered.push_front(&e); } // it was pinned

    // A prompt comes to the layer before this one (-1: to the last): this one's compute is the time to read it.
    void want_layer(int layer);

    // See Table, for these.
    void want(const void * context, int layer, int from, std::vector<Want> & wants);
    void expect(const void * context, int layer, int from, const std::vector<float> & probability);
    void defer(int layer, const std::vector<int> & experts);

    // A context comes to a layer: what was guessed for it was right, or in vain, or is not wanted any more.
    void settle(const Locked & locked, const void * context, int layer);

    // The context is gone.
    void forget(const Locked & locked, const void * context);

    // An abandoned load ends, unless a reader works on it: then it ends with that request.
    void end_abandoned(const Locked & locked, Expert & e);

    // Of a guess, the share that was read when its pass came; fading mean. Where no guess pays, one is tried now and
    // then: a layer comes.
    double read_share() const { return share_read; }
    void   fade_read_share() { share_read += (1 - share_read) / 20000; }

private:
    // Where a context is. Others are elsewhere.
    struct Passage {
        int at   = -1; // the layer that it last acquired
        int last = -1; // that it ever acquired: those that a decode does not pass come behind it
    };

    Residents &                               residents;
    Values &                                  values = residents.values;
    EvictionOrder &                           order  = residents.order;
    Room &                                    room;
    Loader &                                  loads;
    std::deque<Expert *>                      ordered;
    std::deque<Expert *>                      prompt;
    Guesses                                   guesses;
    std::deque<Expert *>                      deferred;
    std::unordered_map<const void *, Passage> passages; // by context
    std::vector<const void *> forecast_for;             // by layer: the context of its forecast, null: there is none
    double                    share_read = 0.5;

    bool next(const Locked & locked, std::deque<Expert *> & wanted, bool scan);
    bool next_guess(const Locked & locked);
    bool next_deferred(const Locked & locked);
    bool has_passed(const void * context, int layer, int from) const;
    void settle_guessed(const Locked & locked, int layer, const void * context);
    void end_forecast(int layer, const void * context);
};

} // namespace pyorch
