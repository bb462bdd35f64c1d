// The connections of llama-server: which of them wait for a request, and which for an answer.
//
//     opened --head is here--> routed --all is here--> received --answer is written--> answered --> ... --> closed
//
// A thread of the server serves one connection at a time, and tells what becomes of it. A socket is known from opened
// to closed, which is told before it is closed: so what is shut down here is never another's.

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

    // socket -1: that of the calling thread
    void tell(int socket, State state);

    // Whether the connection of the calling thread comes from this machine: loopback, or a Unix socket.
    bool is_local() const;

    Counts counts();

    // From now on: connections end that have no whole request after so many seconds.
    void limit(double head_seconds, double body_seconds);

    // Ends connections that have no whole request, now and from now on; all: the others too.
    void cut(bool all);

    // From now on none is ended for that.
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
