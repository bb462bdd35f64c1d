// Reads ahead of need: which experts to read, and when to stop.
//
// Four kinds, in this order: experts that were ordered by name, the next layer of a prompt, guesses, and experts that
// were just replaced. An expert gets memory only when a reader is free. A guess or a deferred expert gets it only when
// no reader works, and not from an expert of its layer's last pass. A guess whose pass did not use it is abandoned: the
// current request ends, and no other begins.

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

    // Start the load of an expert, if one waits and memory is free.
    bool start_order(const Locked & locked) { return next(locked, ordered, false) || next(locked, prompt, true); }
    bool start_guess(const Locked & locked) { return next_guess(locked) || next_deferred(locked); }

    bool is_idle() const { return ordered.empty() && prompt.empty() && guesses.empty() && deferred.empty(); }

    void order_by_name(Expert & e) { ordered.push_back(&e); }
    void order_first(Expert & e) { ordered.push_front(&e); } // a pinned one

    // A prompt comes to the layer before this one (-1: to the last). Its computing is the time to read this layer.
    void want_layer(int layer);

    // See Table.
    void want(const void * context, int layer, int from, std::vector<Want> & wants);
    void expect(const void * context, int layer, int from, const std::vector<float> & probability);
    void defer(int layer, const std::vector<int> & experts);

    // A context comes to a layer: settles its guesses for it, which were right, wrong or are not wanted any more.
    void settle(const Locked & locked, const void * context, int layer);

    // The context is gone.
    void forget(const Locked & locked, const void * context);

    // Ends an abandoned load; if a reader works on it, that request ends first.
    void end_abandoned(const Locked & locked, Expert & e);

    // The share of a guess that was read when its pass came; a fading mean. While no guess pays, one is tried now and
    // then.
    double read_share() const { return share_read; }
    void   fade_read_share() { share_read += (1 - share_read) / 20000; }

private:
    // The place of a context. Other contexts are elsewhere.
    struct Passage {
        int at   = -1; // the layer that it last acquired
        int last = -1; // the last layer that it ever acquired: layers that no decode passes come behind it
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
    std::unordered_map<const void *, Passage> passages;     // by context
    std::vector<const void *>                 forecast_for; // by layer: the context of its forecast, or null
    double                                    share_read = 0.5;

    bool next(const Locked & locked, std::deque<Expert *> & wanted, bool scan);
    bool next_guess(const Locked & locked);
    bool next_deferred(const Locked & locked);
    bool has_passed(const void * context, int layer, int from) const;
    void settle_guessed(const Locked & locked, int layer, const void * context);
    void end_forecast(int layer, const void * context);
};

} // namespace pyorch
