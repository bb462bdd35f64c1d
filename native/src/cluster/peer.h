// Peer: the connection to another server, which computes experts for this one.
//
//     joining --WELCOME--> joined --lost--> joining again, every 250 ms; after a refusal the pause doubles until an
//        |                   |              answer comes; after an answer that took too long, the pause is answer_ms,
//        |                   |              the longest
//        +--REFUSED----------+--rubbish---> closed for good
//
// One thread connects, receives, and sends the rest of what the kernel did not take at once. Every question gets an
// answer: rows, or a failure, which a lost connection gives at the latest. A server that is silent for timeout_ms is
// lost; a ping goes to it three times as often.

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
    int     answer_ms = 60000; // after so long without an answer, the server is lost
};

// The answer to a question.
class Answer {
public:
    // Waits; false: it failed.
    bool wait();

    // True: it failed because the server was lost; ask again when it is back. False: the server cannot compute it.
    bool was_lost();

    std::vector<float> rows; // [n_slots][n_out], after wait()

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
    // A pace is forgotten after so many times its length without a question: then a try costs little.
    static constexpr double FORGOTTEN = 50;

    // A fifth of the silence after which a listener closes the connection.
    static constexpr int MAX_BEAT_MS = 2000;

    // Pause before it joins again after a loss.
    static constexpr int PAUSE_MS = 250;

    // Slots that wait on a server at once, in the most slots of one request. It has room for these, whatever others
    // ask.
    static constexpr int MOST_WAITING = 2;

    // changed: called by the peer's thread after it joined or was lost. Throws Failure for an impossible address.
    Peer(PeerConfig config, std::function<void()> changed);
    ~Peer();

    const PeerConfig config;

    // Waits until it joined, or the first attempt failed; returns the reason of that.
    std::string wait_joined();

    bool joined() const { return is_joined; }

    // Null if it is lost, or has no room for the slots. frame: of COMPUTE.
    std::shared_ptr<Answer> ask(std::shared_ptr<Frame> frame, int n_slots, int n_out);

    // The same, but waits for room.
    std::shared_ptr<Answer> ask_in_turn(std::shared_ptr<Frame> frame, int n_slots, int n_out);

    // Further slots for which it has room now.
    int64_t room();

    // Expected seconds to the answer for so many slots, behind the pending questions. 0 if unknown: none has come, or
    // none was asked for so long that the server may have become faster.
    double answer_seconds(int n_slots);

    // Of all its answers; if it is forgotten, only `pending` is not 0.
    pyorch_pace pace();

    // Most slots of a request; valid while it is joined.
    int max_slots() const { return most_slots; }

    bool             same_bits() const { return has_same_kernels && config.rows == RowType::F32; }
    pyorch_peer_info counts(); // without the rest
    std::string      error();  // the reason of the last loss, "" without one

    // The time of the last loss; before all times if there was none.
    Clock::time_point lost_since();

private:
    struct Question {
        std::shared_ptr<Answer> answer;
        uint64_t                n_numbers; // in the answer
        int                     n_slots;
        Clock::time_point       since;
    };
    // The pace of answers with similar numbers of slots.
    struct Pace {
        double            seconds = 0; // fading geometric mean: one late answer says little of the next
        Clock::time_point since;       // of the last answer
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
    Socket                       socket; // its thread alone writes it, under the mutex, and reads it without it
    std::deque<Outgoing>         out GUARDED_BY(mutex);
    std::map<uint64_t, Question> questions GUARDED_BY(mutex); // by id
    uint64_t                     last_id GUARDED_BY(mutex) = 0;
    std::array<Pace, N_PACES>    paces GUARDED_BY(mutex); // by the binary logarithm of their slots: MAX_SLOTS at most
    pyorch_pace                  overall GUARDED_BY(mutex) = {};
    Clock::time_point            answered GUARDED_BY(mutex); // the last one
    pyorch_peer_info             counters GUARDED_BY(mutex) = {};
    std::string                  sentence GUARDED_BY(mutex);
    Clock::time_point            lost_at GUARDED_BY(mutex);
    bool                         has_tried GUARDED_BY(mutex) = false;

    // Used by its thread only: the frame that arrives.
    FrameHeader       header;
    std::vector<char> payload;
    Question          question;       // of the answer that arrives
    uint64_t          received   = 0; // bytes of the header; once that is complete, of the payload
    bool              in_payload = false;
    bool              cut_off    = false;
    bool              overloaded = false;       // a question so soon would wait as long again
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
