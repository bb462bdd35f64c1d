#include "connections.h"

#include <algorithm>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>

namespace pyorch {
namespace {

thread_local int of_this_thread = -1;

} // namespace

Connections::~Connections() {
    {
        MutexLock lock(mutex);
        stops = true;
    }
    ended.notify_all();
    if (watch.joinable()) {
        watch.join();
    }
}

void Connections::tell(int socket, State state) {
    if (socket < 0) {
        socket = of_this_thread;
    }
    if (socket < 0) {
        return;
    }
    MutexLock lock(mutex);
    if (state == CLOSED) {
        of_this_thread = -1;
        connections.erase(socket);
        return;
    }
    of_this_thread      = socket;
    connections[socket] = { state, Clock::now() };
    if (cuts_all || (cuts_arriving && connections[socket].arrives())) {
        shutdown(socket, SHUT_RDWR);
    }
}

bool Connections::is_local() const {
    sockaddr_storage address = {};
    socklen_t        size    = sizeof(address);
    if (of_this_thread < 0 || getpeername(of_this_thread, (sockaddr *) &address, &size) != 0) {
        return false;
    }
    if (address.ss_family == AF_INET) {
        return (ntohl(((sockaddr_in *) &address)->sin_addr.s_addr) >> 24) == 127;
    }
    if (address.ss_family == AF_INET6) {
        const in6_addr & ip = ((sockaddr_in6 *) &address)->sin6_addr;
        return IN6_IS_ADDR_LOOPBACK(&ip) || (IN6_IS_ADDR_V4MAPPED(&ip) && ip.s6_addr[12] == 127);
    }
    return address.ss_family == AF_UNIX;
}

Connections::Counts Connections::counts() {
    MutexLock lock(mutex);
    Counts    counts;
    for (const auto & [socket, connection] : connections) {
        ++(connection.arrives() ? counts.arriving : counts.answering);
    }
    return counts;
}

double Connections::waited(uint64_t n) {
    MutexLock                      lock(mutex);
    std::vector<Clock::time_point> arrived;
    for (const auto & [socket, connection] : connections) {
        if (!connection.arrives() && socket != of_this_thread) {
            arrived.push_back(connection.since);
        }
    }
    if (n < 1 || n > arrived.size()) {
        return 0;
    }
    std::sort(arrived.rbegin(), arrived.rend());
    return std::chrono::duration<double>(Clock::now() - arrived[n - 1]).count();
}

void Connections::limit(double head_seconds, double body_seconds) {
    MutexLock lock(mutex);
    head_limit = std::chrono::duration<double>(head_seconds);
    body_limit = std::chrono::duration<double>(body_seconds);
    if (!watch.joinable()) {
        watch = std::thread([this] { cut_late(); });
    }
}

void Connections::cut(bool all) {
    MutexLock lock(mutex);
    cuts_arriving = true;
    cuts_all      = all;
    for (const auto & [socket, connection] : connections) {
        if (all || connection.arrives()) {
            shutdown(socket, SHUT_RDWR);
        }
    }
}

void Connections::accept() {
    MutexLock lock(mutex);
    cuts_arriving = cuts_all = false;
}

void Connections::cut_late() {
    MutexLock lock(mutex);
    while (!ended.wait_for(mutex, std::chrono::milliseconds(250), [this]() REQUIRES(mutex) { return stops; })) {
        const auto now = Clock::now();
        for (const auto & [socket, connection] : connections) {
            if (connection.arrives() &&
                now - connection.since > (connection.state == ROUTED ? body_limit : head_limit)) {
                shutdown(socket, SHUT_RDWR);
            }
        }
    }
}

} // namespace pyorch
