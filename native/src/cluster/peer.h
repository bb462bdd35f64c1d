// Another server, as one that asks it sees it: a connection that lives as long as it can.
//
//     joining --WELCOME--> joined --lost--> joining again, four times a second; when it was refused, after twice as long
//        |                   |              each time until it gets an answer; and when an answer took too long, after as
//        |                   |              long as one may take, which is also the longest
//        +--REFUSED----------+--rubbish---> cut off, for good
//
// One thread connects, receives, and sends what the kernel did not take at once; who asks sends as much as goes without
// waiting. Every question gets an answer: rows, or that it failed, at the latest when the connection is lost. A server
// that is silent for timeout_ms is lost: it is asked for a sign of life three times as often.

#pragma once

#include "base/mutex.h"
#include "cluster/frames.h"
#include "cluster/socket.h"
#include "pyorch-cluster.h"

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <thread>

namespace pyorch {

struct PeerConfig : Endpoint {
    int     timeout_ms;
    RowType rows      = RowType::F32;
    int     answer_ms = 60000; // an answer that takes longer is none, and the server is lost
};

// What comes of a question.
class Answer {
public:
    // Until it is there; false: it failed.
    bool wait();

    // It failed because the server was lost, which may be asked again when it is back; else the server cannot.
    bool was_lost();

    std::vector<float> rows; // [n_slots][n_out], once it is there

private:
    friend class Peer;
    enum State { PENDING, HERE, FAILED, LOST };

    Mutex   mutex;
    CondVar settled;
    State   state GUARDED_BY(mutex) = PENDING;

    void settle(State as);
};

class Peer {
public:
    // What is known of how long it takes is forgotten after so many times as long: so that trying again costs little.
    static constexpr double FORGOTTEN = 50;

    // A server drops who is silent for five times as long.
    static constexpr int MAX_BEAT_MS = 2000;

    // Before it is joined again, when it was lost.
    static constexpr int PAUSE_MS = 250;

    // Of the slots that a server takes in one request: so many times as many wait there at once, of all that is asked
    // here. It has room for these, whatever others ask it.
    static constexpr int MOST_WAITING = 2;

    // changed: it joined, or was lost. Called by its thread. Throws Failure for what is no address.
    Peer(PeerConfig config, std::function<void()> changed);
    ~Peer();

    const PeerConfig config;

    // Until it joined, or the first attempt failed: then, why.
    std::string wait_joined();

    bool joined() const { return is_joined; }

    // Null where it is lost, or has no room for these. frame: of COMPUTE, for so many slots.
    std::shared_ptr<Answer> ask(std::shared_ptr<Frame> frame, int n_slots, int n_out);

    // The same, but waits for room.
    std::shared_ptr<Answer> ask_in_turn(std::shared_ptr<Frame> frame, int n_slots, int n_out);

    // For so many slots more it has room now.
    int64_t room();

    // Until the answer for so many slots, as such answers came lately, behind what it was asked for before; 0 where that
    // is not known: none has come, or it was not asked for much longer than that, and may have become faster.
    double answer_seconds(int n_slots);

    // Of all its answers; all 0 but for what is pending where that is forgotten.
    pyorch_pace pace();

    // Of a request that it takes, while it is joined.
    int max_slots() const { return most_slots; }

    bool             same_bits() const { return has_same_kernels && config.rows == RowType::F32; }
    pyorch_peer_info counts(); // without the rest
    std::string      error();  // why it was lost last, "" if it never was

    // When it was lost last, or before anything, if it never was.
    Clock::time_point lost_since();

private:
    struct Question {
        std::shared_ptr<Answer> answer;
        uint64_t                n_numbers; // of the answer
        int                     n_slots;
        Clock::time_point       since;
    };
    // Of answers for alike many slots.
    struct Pace {
        double            seconds = 0; // fading geometric mean: one late answer says little of the next
        Clock::time_point since;       // the last one came
    };
    static constexpr size_t N_PACES = 13;

    struct Outgoing {
        std::shared_ptr<Frame> frame;
        uint64_t               sent;
    };

    std::function<void()> changed;
    std::atomic<bool>     is_joined{ false };
    std::atomic<bool>     has_same_kernels{ false };
    std::atomic<int>      most_slots{ 1 };
    std::atomic<bool>     stopping{ false };
    Waker                 waker;

    Mutex                        mutex;
    CondVar                      tried, answered_some;
    Socket                       socket; // its thread alone writes it, under the mutex, and reads it without
    std::deque<Outgoing>         out GUARDED_BY(mutex);
    std::map<uint64_t, Question> questions GUARDED_BY(mutex); // by id
    uint64_t                     last_id GUARDED_BY(mutex) = 0;
    std::array<Pace, N_PACES>    paces GUARDED_BY(mutex); // by the binary logarithm of their slots: MAX_SLOTS at most
    pyorch_pace                  overall GUARDED_BY(mutex) = {};
    Clock::time_point            answered GUARDED_BY(mutex); // the last question
    pyorch_peer_info             counters GUARDED_BY(mutex) = {};
    std::string                  sentence GUARDED_BY(mutex);
    Clock::time_point            lost_at GUARDED_BY(mutex);
    bool                         has_tried GUARDED_BY(mutex) = false;

    // Of its thread alone: the frame that is being received.
    FrameHeader       header;
    std::vector<char> payload;
    Question          question;       // whose answer it is
    uint64_t          received   = 0; // bytes of the header or, once that is complete, of the payload
    bool              in_payload = false;
    bool              cut_off    = false;
    bool              overloaded = false;       // what asks it so soon again would wait as long
    int               refusals   = 0;           // since its last answer
    uint64_t          n_pings = 0, n_pongs = 0; // since it was joined
    Clock::time_point joined_at, last_heard;

    std::thread thread;

    static size_t           pace_of(int n_slots);
    int64_t                 pending() const REQUIRES(mutex); // slots
    bool                    has_room_for(int n_slots) const REQUIRES(mutex);
    std::shared_ptr<Answer> send(std::shared_ptr<Frame> frame, int n_slots, int n_out) REQUIRES(mutex);
    const Pace *            known_pace(int n_slots) const REQUIRES(mutex);
    void                    note_pace(const Question & last) REQUIRES(mutex);
    void                    run();
    std::string             live();
    void                    lose(const std::string & why);
    void                    push(std::shared_ptr<Frame> frame) REQUIRES(mutex);
    void                    flush() REQUIRES(mutex);
    bool                    is_as_it_is() const;
    std::string             receive();
    std::string             accept_header();
    std::string             accept_payload();
    std::string             rubbish(const std::string & what);
};

} // namespace pyorch
