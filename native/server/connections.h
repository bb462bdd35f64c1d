// The states of llama-server's connections: waiting for a request, or for an answer.
//
//     opened --head arrived--> routed --all arrived--> received --answer is written--> answered --> ... --> closed
//
// A thread of the server serves one connection at a time, and reports its state. CLOSED is reported before the socket
// is closed. So this class never shuts down a socket that belongs to another connection. llama-server itself stops the
// request of a client that left (`should_stop`, server.cpp).

#pragma once

#include "base/mutex.h"

#include <chrono>
#include <cstdint>
#include <thread>
#include <unordered_map>

namespace pyorch {

class Connections {
public:
    enum State { OPENED, ROUTED, RECEIVED, ANSWERED, CLOSED };

    struct Counts {
        uint64_t arriving  = 0;
        uint64_t answering = 0;
    };

    ~Connections();

    // Reports a connection's state. socket -1: the connection of the calling thread.
    void tell(int socket, State state);

    // Returns whether the connection of the calling thread is local: over loopback, or a Unix socket.
    bool is_local() const;

    Counts counts();

    // Returns the age in seconds of the n-th newest request without an answer; 0: fewer requests lack one.
    // Requests of the calling thread do not count.
    double waited(uint64_t n);

    // From now on closes connections without a complete head, or body, after so many seconds.
    void limit(double head_seconds, double body_seconds);

    // Closes connections without a complete request, now and from now on; all: also the others.
    void cut(bool all);

    // Ends the effect of cut().
    void accept();

private:
    using Clock = std::chrono::steady_clock;

    struct Connection {
        State             state;
        Clock::time_point since;
        bool              arrives() const { return state != RECEIVED; }
    };

    Mutex                               mutex;
    CondVar                             ended;
    std::unordered_map<int, Connection> connections GUARDED_BY(mutex); // by socket
    std::thread                         watch GUARDED_BY(mutex);
    std::chrono::duration<double>       head_limit GUARDED_BY(mutex) = {}, body_limit GUARDED_BY(mutex) = {};
    bool                                cuts_arriving GUARDED_BY(mutex) = false;
    bool                                cuts_all GUARDED_BY(mutex)      = false;
    bool                                stops GUARDED_BY(mutex)         = false;

    void cut_late();
};

} // namespace pyorch
