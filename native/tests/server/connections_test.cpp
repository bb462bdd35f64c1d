// Connections that end because their request does not come, and those that are cut.

#include "check.h"
#include "connections.h"

#include <sys/socket.h>
#include <thread>
#include <unistd.h>

using namespace pyorch;

namespace {

struct Pair {
    int server, client;
    Pair() {
        int both[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, both) == 0);
        server = both[0];
        client = both[1];
    }
    ~Pair() {
        close(server);
        close(client);
    }
    // Whether it was ended; sleeps until then where it will be.
    bool ended(bool wait) const {
        char    byte;
        ssize_t n = recv(client, &byte, 1, wait ? 0 : MSG_DONTWAIT);
        return n == 0;
    }
};

void test_a_request_that_does_not_come_ends_its_connection() {
    Connections connections;
    Pair        head, body, whole;
    // Each is served by a thread of its own.
    std::thread([&] { connections.tell(head.server, Connections::OPENED); }).join();
    std::thread([&] {
        connections.tell(body.server, Connections::OPENED);
        connections.tell(-1, Connections::ROUTED);
    }).join();
    std::thread([&] {
        connections.tell(whole.server, Connections::OPENED);
        connections.tell(-1, Connections::ROUTED);
        connections.tell(-1, Connections::RECEIVED);
    }).join();
    CHECK(connections.counts().arriving == 2 && connections.counts().answering == 1);
    connections.limit(0.1, 1e9);
    CHECK(head.ended(true));
    CHECK(!body.ended(false));
    connections.limit(0.1, 0.1);
    CHECK(body.ended(true));
    CHECK(!whole.ended(false));
}

void test_what_runs_is_cut_only_when_all_are() {
    Connections connections;
    Pair        arriving, running, late, closed;
    connections.tell(closed.server, Connections::OPENED);
    connections.tell(closed.server, Connections::CLOSED);
    connections.tell(arriving.server, Connections::OPENED);
    connections.tell(running.server, Connections::OPENED);
    connections.tell(-1, Connections::RECEIVED);
    CHECK(connections.is_local());
    connections.cut(false);
    CHECK(arriving.ended(true));
    CHECK(!running.ended(false));
    connections.tell(late.server, Connections::OPENED);
    CHECK(late.ended(true));
    connections.cut(true);
    CHECK(running.ended(true));
    CHECK(!closed.ended(false));
}

} // namespace

int main() {
    test_a_request_that_does_not_come_ends_its_connection();
    test_what_runs_is_cut_only_when_all_are();
    return 0;
}
