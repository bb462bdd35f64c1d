// The listening side: accepts other servers, checks what they send, and answers.
//
// One thread has all connections and never blocks on one. Another thread computes the requests of one connection after
// the other. All connections share one quota of memory for requests and answers; one connection has at most half. A
// request is read once the quota has room for it and its answer. Until then it stays in the kernel, in the order of
// arrival, and its server gets signs of life. So each request that was read can be answered. A connection that holds
// room and stalls (sends half a frame, reads nothing) is closed if others wait for room. A connection that sends
// an impossible frame gets a sentence and is closed; a silent one is closed.

#pragma once

#include "base/mutex.h"
#include "cluster/frames.h"
#include "cluster/socket.h"
#include "pyorch-cluster.h"

#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <thread>

namespace pyorch {

struct ListenerConfig : Endpoint {
    std::vector<LayerShape> layers;
    uint64_t                quota    = UINT64_MAX; // bytes; MIN_REQUESTS of the largest size is enough
    int                     stall_ms = 1000;       // a connection without progress for so long loses its room to others
};

// Bytes of the largest request of so many slots, with its answer.
uint64_t largest_with_answer(const std::vector<LayerShape> & layers, uint64_t n_slots = ExpertRows::MAX_SLOTS);

class Listener {
public:
    static constexpr int MAX_STRANGERS = 16;    // connections before HELLO; with more, the oldest is closed
    static constexpr int JOIN_MS       = 3000;  // from connecting to HELLO
    static constexpr int IDLE_MS       = 10000; // a connection silent for so long is closed: signs of life come faster
    static constexpr int FRAME_MS      = 60000; // for one frame: the other side waits no longer, either
    static constexpr int MAX_QUEUED    = 64;    // waiting requests and answers of a connection
    static constexpr int MIN_REQUESTS  = 4;     // of the largest size, with answers: the quota has room for these
    static constexpr int SIGN_MS       = 100;   // between signs of life

    // compute: writes the outputs [n_slots][n_out] of rows, or throws Failure; called by one thread. Throws Failure if
    // it cannot listen.
    using Compute = std::function<void(const ExpertRows & rows, float * outputs)>;
    Listener(ListenerConfig config, Compute compute);
    ~Listener();

    // Bytes for the requests and answers of all connections.
    const uint64_t quota;

    // Most slots of a request.
    const int max_slots;

    int           port() const { return port_of(listening); }
    pyorch_served counts(); // buffer_bytes: of the quota
    std::string   error();  // the reason of the last refusal or close, "" without one

private:
    struct Request {
        uint64_t          id;
        std::vector<char> payload;
        uint64_t          room; // in the quota, with its answer
    };
    struct Session : std::enable_shared_from_this<Session> {
        Socket socket;

        // Used by the connections' thread only.
        bool              joined   = false;
        FrameHeader       header   = {}; // of the arriving frame
        size_t            received = 0;  // bytes of header and payload
        std::vector<char> payload;
        Clock::time_point heard = Clock::now(), begun = heard; // begun: of the frame
        Clock::time_point signed_at = {};                      // the last sign of life for its waiting request

        // That thread alone writes these, under the mutex, and reads them without it.
        uint64_t          room   = 0;     // of the arriving request, with its answer
        bool              waits  = false; // for room: nothing is read
        bool              ended  = false;
        Clock::time_point linger = {}; // refused: what it sends until then is dropped

        // Guarded by the listener's mutex.
        std::deque<Request> requests;
        std::deque<Frame>   out;
        uint64_t            sent  = 0;  // bytes of the first frame
        Clock::time_point   since = {}; // when that became the first one
        Clock::time_point   moved = {}; // when a byte of it was sent last
        uint64_t            held  = 0;  // bytes of the quota

        bool refused() const { return linger != Clock::time_point(); }
        bool cut_off() const { return ended || refused(); }
    };
    struct Place {
        char * to;
        size_t bytes;
    };

    const ListenerConfig config;
    const Compute        compute;
    const size_t         max_sessions; // leaves descriptors for other uses
    Hello                expected;
    Socket               listening;
    Waker                waker;

    Mutex                                mutex;
    CondVar                              asked;
    bool                                 stopping GUARDED_BY(mutex) = false;
    std::deque<std::shared_ptr<Session>> turns GUARDED_BY(mutex);   // sessions with requests, in turn
    std::list<std::shared_ptr<Session>>  waiting GUARDED_BY(mutex); // for room, in order of arrival
    uint64_t                             held GUARDED_BY(mutex)     = 0;
    pyorch_served                        counters GUARDED_BY(mutex) = {};
    std::string                          sentence GUARDED_BY(mutex);

    std::list<std::shared_ptr<Session>> sessions; // of the connections' thread, like the functions down to end()
    char                                ignored[4096];
    std::thread                         connections, worker;

    void        serve_all();
    void        accept_next();
    void        receive(Session & session);
    Place       place_for(Session & session);
    std::string take(Session & session, size_t bytes);
    std::string accept_header(Session & session);
    void        accept_head(Session & session);
    std::string accept_frame(Session & session);
    std::string join(Session & session);
    void        look_at_clock(Session & session) REQUIRES(mutex);
    bool        give_room() REQUIRES(mutex);
    bool        stalls(const Session & session) const REQUIRES(mutex);
    void        make_room() REQUIRES(mutex);
    void        refuse(Session & session, const std::string & why) REQUIRES(mutex);
    void        end(Session & session) REQUIRES(mutex);
    void        send(Session & session, Frame frame) REQUIRES(mutex);
    void        flush(Session & session) REQUIRES(mutex);
    void        hold(Session & session, int64_t bytes) REQUIRES(mutex);
    void        release(Session & session) REQUIRES(mutex);
    void        compute_all();
};

} // namespace pyorch
