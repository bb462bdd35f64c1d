// Where other servers ask this one: it listens, checks who joins and what they send, and answers.
//
// A thread accepts, each connection has one that receives, and one thread computes what was asked in the order in which
// it came: so a server that computes long still gives signs of life. Whoever sends what cannot be is told so in a
// sentence and cut off; who is silent is dropped.

#pragma once

#include "cluster/frames.h"
#include "cluster/socket.h"
#include "pyorch-cluster.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

namespace pyorch {

struct ListenerConfig : Endpoint {
    std::vector<LayerShape> layers;
};

class Listener {
public:
    static constexpr int MAX_SESSIONS = 64;
    static constexpr int MAX_QUEUED   = 64;    // requests of a connection that wait
    static constexpr int IDLE_MS      = 10000; // who is silent for so long is gone: signs of life come more often
    static constexpr int JOIN_MS      = 3000;  // to say who one is

    // compute: outputs [n_slots][n_out] of rows, or throws Failure; called by one thread. Throws Failure where it
    // cannot listen.
    using Compute = std::function<void(const ExpertRows & rows, float * outputs)>;
    Listener(ListenerConfig config, Compute compute);
    ~Listener();

    int           port() const { return port_of(listening); }
    pyorch_served counts(); // without the rest
    std::string   error();  // why it refused or cut off somebody last, "" if it never did

private:
    struct Session {
        Socket      socket;
        std::mutex  sending;
        std::thread thread;
        bool        ended  = false; // these two are guarded by the mutex of the listener
        int         queued = 0;
    };
    struct Request {
        std::shared_ptr<Session> session;
        uint64_t                 id;
        std::vector<char>        payload;
    };

    const ListenerConfig config;
    const Compute        compute;
    Hello                expected;
    Socket               listening;
    Waker                waker;

    std::mutex                          mutex;
    std::condition_variable             asked;
    bool                                stopping = false;
    std::list<std::shared_ptr<Session>> sessions;
    std::deque<Request>                 requests;
    pyorch_served                       counters = {};
    std::string                         sentence;

    std::thread acceptor, worker;

    void        accept_all();
    void        serve(const std::shared_ptr<Session> & session);
    std::string join(Session & session);
    std::string converse(const std::shared_ptr<Session> & session);
    void        compute_all();
    bool        send(Session & session, const Frame & frame);
};

} // namespace pyorch
