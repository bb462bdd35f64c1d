// Where other servers ask this one: it listens, checks who joins and what they send, and answers.
//
// One thread has all connections and never waits for one of them; another one computes what was asked, of one connection
// after the other. A request is read once there is room for it and its answer in one quota for all connections, of which
// one has half at most; until then it stays where it is, in the order in which requests came, and who asks gets signs of
// life. So what is read can always be answered. Who holds room and does not go on (sends half of something, reads
// nothing) is cut off where others wait for that. Whoever sends what cannot be is told so in a sentence and cut off; who
// is silent is dropped.

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
    uint64_t                quota    = UINT64_MAX; // bytes; what MIN_REQUESTS of the largest ones take is enough
    int                     stall_ms = 1000; // who moves nothing for so long loses its room where others wait for it
};

// What the largest request takes with its answer, of so many slots.
uint64_t largest_with_answer(const std::vector<LayerShape> & layers, uint64_t n_slots = ExpertRows::MAX_SLOTS);

class Listener {
public:
    static constexpr int MAX_STRANGERS = 16;    // who have not joined yet; of more, the first ones go
    static constexpr int JOIN_MS       = 3000;  // to say who one is
    static constexpr int IDLE_MS       = 10000; // who is silent for so long is gone: signs of life come more often
    static constexpr int FRAME_MS      = 60000; // from a frame's beginning to its end: who asks waits no longer, either
    static constexpr int MAX_QUEUED    = 64;    // requests and answers of a connection that wait
    static constexpr int MIN_REQUESTS  = 4;     // as large as any, with their answers: so many have room together
    static constexpr int SIGN_MS       = 100;   // between signs of life for those

    // compute: outputs [n_slots][n_out] of rows, or throws Failure; called by one thread. Throws Failure where it
    // cannot listen.
    using Compute = std::function<void(const ExpertRows & rows, float * outputs)>;
    Listener(ListenerConfig config, Compute compute);
    ~Listener();

    // Of requests and answers, of all connections.
    const uint64_t quota;

    // Of a request.
    const int max_slots;

    int           port() const { return port_of(listening); }
    pyorch_served counts(); // buffer_bytes: of the quota
    std::string   error();  // why it refused or cut off somebody last, "" if it never did

private:
    struct Request {
        uint64_t          id;
        std::vector<char> payload;
        uint64_t          room; // in the quota, with its answer
    };
    struct Session : std::enable_shared_from_this<Session> {
        Socket socket;

        // Of the thread that has the connections.
        bool              joined   = false;
        FrameHeader       header   = {}; // of the frame that comes
        size_t            received = 0;  // bytes of it and of its header
        std::vector<char> payload;
        Clock::time_point heard = Clock::now(), begun = heard; // begun: the frame
        Clock::time_point signed_at = {};                      // while it waits, its last sign of life

        // That thread alone writes these, under the mutex, and reads them without.
        uint64_t          room   = 0;     // of the request that comes, with its answer
        bool              waits  = false; // for that: nothing is read
        bool              ended  = false;
        Clock::time_point linger = {}; // refused: what it sends is thrown away until then

        // Guarded by the mutex of the listener.
        std::deque<Request> requests;
        std::deque<Frame>   out;
        uint64_t            sent  = 0;  // bytes of the first of them
        Clock::time_point   since = {}; // when that became the first
        Clock::time_point   moved = {}; // when something of it went last
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
    const size_t         max_sessions; // more would leave too few descriptors for anything else
    Hello                expected;
    Socket               listening;
    Waker                waker;

    Mutex                                mutex;
    CondVar                              asked;
    bool                                 stopping GUARDED_BY(mutex) = false;
    std::deque<std::shared_ptr<Session>> turns GUARDED_BY(mutex);   // sessions with requests: the next one has its turn
    std::list<std::shared_ptr<Session>>  waiting GUARDED_BY(mutex); // for room, in their order
    uint64_t                             held GUARDED_BY(mutex)     = 0;
    pyorch_served                        counters GUARDED_BY(mutex) = {};
    std::string                          sentence GUARDED_BY(mutex);

    std::list<std::shared_ptr<Session>> sessions; // of the thread that has them, and so are the functions down to end()
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
