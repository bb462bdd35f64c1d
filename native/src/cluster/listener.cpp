#include "cluster/listener.h"

#include "base/placement.h"
#include "base/status.h"

#include <cstring>
#include <new>
#include <poll.h>
#include <sys/socket.h>
#include <system_error>

namespace pyorch {
namespace {

// As long for any two texts of a length, wherever they differ.
template <size_t n>
bool same_text(const char (&a)[n], const char (&b)[n]) {
    volatile unsigned char differs = 0;
    for (size_t i = 0; i < n; ++i) {
        differs = differs | ((unsigned char) a[i] ^ (unsigned char) b[i]);
    }
    return differs == 0;
}

uint64_t ns_since(Clock::time_point begin) {
    return (uint64_t) std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
}

} // namespace

Listener::Listener(ListenerConfig config_, Compute compute) :
        config(std::move(config_)), compute(std::move(compute)), expected(hello_of(config)) {
    if (config.token.empty()) {
        throw Failure(PYORCH_INVALID, "servers that listen need a token, by which others are known");
    }
    listening = listen_at(config.address, config.port);
    acceptor  = std::thread([this] { accept_all(); });
    worker    = std::thread([this] { compute_all(); });
}

Listener::~Listener() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
        for (auto & session : sessions) {
            shutdown(session->socket.fd(), SHUT_RDWR);
        }
    }
    asked.notify_all();
    waker.wake();
    acceptor.join();
    worker.join();
    for (auto & session : sessions) { // no other thread adds or takes any
        session->thread.join();
    }
}

pyorch_served Listener::counts() {
    std::lock_guard<std::mutex> lock(mutex);
    return counters;
}

std::string Listener::error() {
    std::lock_guard<std::mutex> lock(mutex);
    return sentence;
}

void Listener::accept_all() {
    for (;;) {
        pollfd fds[] = { { listening.fd(), POLLIN, 0 }, { waker.fd(), POLLIN, 0 } };
        poll(fds, 2, -1);
        waker.drain(); // before it is asked whether to stop: who says so then wakes it again
        std::list<std::shared_ptr<Session>> over;
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (stopping) {
                return;
            }
            for (auto session = sessions.begin(); session != sessions.end();) {
                const auto next = std::next(session);
                if ((*session)->ended) {
                    over.splice(over.end(), sessions, session);
                }
                session = next;
            }
        }
        for (auto & session : over) {
            session->thread.join();
        }
        Socket socket = accept_from(listening);
        if (!socket.open()) { // where the system has no descriptor left, it is not to be asked all the time
            pollfd p = { waker.fd(), POLLIN, 0 };
            poll(&p, 1, 50);
            continue;
        }
        std::lock_guard<std::mutex> lock(mutex);
        if (stopping || sessions.size() >= MAX_SESSIONS) {
            ++counters.refused;
            sentence = format("more than %d servers are connected", MAX_SESSIONS);
            continue;
        }
        auto session    = std::make_shared<Session>();
        session->socket = std::move(socket);
        try {
            session->thread = std::thread([this, session] { serve(session); });
            sessions.push_back(session);
        } catch (const std::system_error &) {
            ++counters.refused;
            sentence = "the system has no thread for one more server";
        }
    }
}

bool Listener::send(Session & session, const Frame & frame) {
    std::lock_guard<std::mutex> lock(session.sending);
    if (send_all(session.socket, frame.data(), frame.size(), JOIN_MS)) {
        return true;
    }
    shutdown(session.socket.fd(), SHUT_RDWR); // half a frame may be under way
    return false;
}

void Listener::serve(const std::shared_ptr<Session> & session) {
    place_thread(false);
    std::string why;
    try {
        why = join(*session);
        if (why.empty()) {
            why = converse(session);
        }
    } catch (const std::bad_alloc &) {
        why = "there is no memory for a request as large as its";
    }
    if (!why.empty()) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            ++counters.refused;
            sentence = why;
        }
        if (send(*session, make_frame(FrameKind::REFUSED, 0, why))) {
            // What it goes on sending is thrown away for a while: else the system would throw the sentence away.
            shutdown(session->socket.fd(), SHUT_WR);
            char       ignored[4096];
            const auto deadline = Clock::now() + std::chrono::milliseconds(500);
            while (receive_all(session->socket, ignored, sizeof(ignored), 500, deadline)) {
            }
        }
    }
    shutdown(session->socket.fd(), SHUT_RDWR);
    {
        std::lock_guard<std::mutex> lock(mutex);
        session->ended = true;
    }
    waker.wake();
}

// Why who connects does not join, "" where it did.
std::string Listener::join(Session & session) {
    const auto  deadline = Clock::now() + std::chrono::milliseconds(JOIN_MS);
    FrameHeader header;
    if (!receive_all(session.socket, (char *) &header, sizeof(header), JOIN_MS, deadline)) {
        return "who connects must say who it is";
    }
    const std::string fault = fault_of(header);
    if (!fault.empty()) {
        return fault;
    }
    Hello hello;
    if (header.kind != (uint16_t) FrameKind::HELLO || header.bytes != sizeof(hello) ||
        !receive_all(session.socket, (char *) &hello, sizeof(hello), JOIN_MS, deadline)) {
        return "who connects must say who it is";
    }
    if (!same_text(hello.token, expected.token)) {
        return "its token is another one";
    }
    if (!same_text(hello.model, expected.model) || hello.shape != expected.shape) {
        return "its model is another one";
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        ++counters.connections;
    }
    const Welcome welcome = { config.kernels };
    send(session, make_frame(FrameKind::WELCOME, 0, &welcome, sizeof(welcome)));
    return "";
}

// Until the connection ends. Returns why it is to end, "" where the other one ended it.
std::string Listener::converse(const std::shared_ptr<Session> & session) {
    const uint64_t most = max_compute_bytes(config.layers);
    for (;;) {
        FrameHeader header;
        if (!receive_all(session->socket, (char *) &header, sizeof(header), IDLE_MS)) {
            return "";
        }
        const std::string fault = fault_of(header);
        if (!fault.empty()) {
            return fault;
        }
        const auto kind = (FrameKind) header.kind;
        if (kind == FrameKind::PING && header.bytes == 0) {
            send(*session, make_frame(FrameKind::PONG, 0, nullptr, 0));
            continue;
        }
        if (kind != FrameKind::COMPUTE || header.bytes > most) {
            return format(
                "a frame of kind %d with %llu bytes was not to come", header.kind, (unsigned long long) header.bytes);
        }
        Request request = { session, header.id, {} };
        request.payload.resize(header.bytes);
        if (header.bytes > 0 && !receive_all(session->socket, request.payload.data(), header.bytes, IDLE_MS)) {
            return "";
        }
        try {
            read_compute(request.payload.data(), header.bytes, config.layers);
        } catch (const Failure & failure) {
            return format("a request cannot be: %s", failure.what());
        }
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (++session->queued > MAX_QUEUED) {
                return format("more than %d requests at once", MAX_QUEUED);
            }
            requests.push_back(std::move(request));
        }
        asked.notify_one();
    }
}

void Listener::compute_all() {
    for (;;) {
        place_thread(true);
        Request request;
        {
            std::unique_lock<std::mutex> lock(mutex);
            asked.wait(lock, [&] { return stopping || !requests.empty(); });
            if (stopping) {
                return;
            }
            request = std::move(requests.front());
            requests.pop_front();
            --request.session->queued;
            if (request.session->ended) {
                continue;
            }
        }
        const ExpertRows rows   = read_compute(request.payload.data(), request.payload.size(), config.layers);
        const uint64_t   bytes  = (uint64_t) rows.n_slots * config.layers[rows.layer].n_out * sizeof(float);
        const auto       begin  = Clock::now();
        Frame            frame  = make_frame(FrameKind::COMPUTED, request.id, nullptr, 0);
        bool             failed = false;
        try {
            set_header(frame, request.id, bytes);
            compute(rows, (float *) (frame.data() + sizeof(FrameHeader)));
        } catch (const std::exception & failure) {
            failed = true;
            frame  = make_frame(FrameKind::FAILED, request.id, failure.what());
        }
        {
            std::lock_guard<std::mutex> lock(mutex);
            ++counters.requests;
            counters.failed += failed;
            counters.slots += rows.n_slots;
            counters.compute_ns += ns_since(begin);
        }
        send(*request.session, frame);
    }
}

} // namespace pyorch
