#include "cluster/listener.h"

#include "base/cpu_time.h"
#include "base/placement.h"
#include "base/status.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

namespace pyorch {
namespace {

using std::chrono::milliseconds;

constexpr size_t CHUNK     = 256 << 10; // received from or sent to a connection in one turn
constexpr int    TICK_MS   = 100;       // between two reads of the clock, at most
constexpr int    LINGER_MS = 500;       // for a refused server to read the sentence
constexpr int    BYTES_MS  = 128;       // of a transfer that others wait for: a slower one counts as stalled
constexpr int    WAIT_MS   = 10;        // in place of TICK_MS while requests wait whose bytes are not polled for
constexpr size_t BEGUN     = 16 << 10;  // so much of a request, or all of it, is proof that it comes

constexpr const char * NOBODY = "who connects must say who it is";

// Takes equally long for any two texts of a length.
template <size_t n>
bool same_text(const char (&a)[n], const char (&b)[n]) {
    volatile unsigned char differs = 0;
    for (size_t i = 0; i < n; ++i) {
        differs = differs | ((unsigned char) a[i] ^ (unsigned char) b[i]);
    }
    return differs == 0;
}

bool is_over(Clock::time_point begin, int ms) { return Clock::now() - begin > milliseconds(ms); }

int most_slots(const std::vector<LayerShape> & layers, uint64_t quota) {
    const uint64_t none = largest_with_answer(layers, 0), slot = largest_with_answer(layers, 1) - none;
    const uint64_t each = quota / Listener::MIN_REQUESTS;
    return (int) std::clamp<uint64_t>((each - std::min(each, none)) / slot, 1, ExpertRows::MAX_SLOTS);
}

size_t half_of_descriptors() {
    rlimit limit = {};
    getrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur / 2;
}

} // namespace

uint64_t largest_with_answer(const std::vector<LayerShape> & layers, uint64_t n_slots) {
    uint64_t n_out = 0;
    for (const LayerShape & layer : layers) {
        n_out = std::max(n_out, (uint64_t) layer.n_out);
    }
    return max_compute_bytes(layers, n_slots) + n_slots * n_out * sizeof(float) + 2 * sizeof(FrameHeader);
}

Listener::Listener(ListenerConfig config_, Compute compute) :
        quota(std::min(config_.quota, MIN_REQUESTS * largest_with_answer(config_.layers))),
        max_slots(most_slots(config_.layers, quota)), config(std::move(config_)), compute(std::move(compute)),
        max_sessions(half_of_descriptors()), expected(hello_of(config)) {
    if (config.token.empty()) {
        throw Failure(PYORCH_INVALID, "servers that listen need a token, by which others are known");
    }
    listening   = listen_at(config.address, config.port);
    connections = std::thread([this] { serve_all(); });
    worker      = std::thread([this] { compute_all(); });
}

Listener::~Listener() {
    {
        MutexLock lock(mutex);
        stopping = true;
    }
    asked.notify_all();
    waker.wake();
    connections.join();
    worker.join();
}

pyorch_served Listener::counts() {
    MutexLock     lock(mutex);
    pyorch_served out = counters;
    out.buffer_bytes  = held;
    return out;
}

std::string Listener::error() {
    MutexLock lock(mutex);
    return sentence;
}

void Listener::serve_all() {
    std::vector<pollfd> fds;
    for (;;) {
        place_thread(false);
        fds              = { { waker.fd(), POLLIN, 0 }, { listening.fd(), POLLIN, 0 } };
        size_t n_waiting = 0;
        {
            MutexLock lock(mutex);
            if (stopping) {
                return;
            }
            n_waiting = waiting.size();
            for (const auto & session : sessions) {
                look_at_clock(*session);
            }
            sessions.remove_if([](const auto & session) { return session->ended; });
            for (const auto & session : sessions) {
                const int events = (session->waits ? 0 : POLLIN) | (session->out.empty() ? 0 : POLLOUT);
                fds.push_back({ session->socket.fd(), (short) events, 0 });
            }
        }
        poll(fds.data(), fds.size(), sessions.empty() ? -1 : n_waiting > 0 ? WAIT_MS : TICK_MS);
        if (fds[0].revents) {
            waker.drain();
        }
        size_t i = 2;
        for (const auto & session : sessions) {
            if (fds[i].revents & POLLOUT) {
                MutexLock lock(mutex);
                flush(*session);
            }
            if (fds[i++].revents & (POLLIN | POLLHUP | POLLERR)) {
                if (session->waits) { // and is closed
                    MutexLock lock(mutex);
                    end(*session);
                } else {
                    receive(*session);
                }
            }
        }
        if (fds[1].revents) {
            accept_next();
        }
        MutexLock lock(mutex);
        make_room(); // after all I/O of this round: a delay of this thread must count against no connection
    }
}

void Listener::accept_next() {
    Socket socket = accept_from(listening);
    if (!socket.open()) { // without free descriptors, wait before the next try
        pollfd p = { waker.fd(), POLLIN, 0 };
        poll(&p, 1, TICK_MS / 2);
        return;
    }
    MutexLock lock(mutex);
    if (sessions.size() >= max_sessions) {
        ++counters.refused;
        sentence = format("more than %zu servers are connected", max_sessions);
        return;
    }
    const auto is_stranger = [](const auto & session) { return !session->joined && !session->ended; };
    if (std::count_if(sessions.begin(), sessions.end(), is_stranger) >= MAX_STRANGERS) {
        ++counters.refused;
        sentence = format("more than %d are connected that did not say who they are", MAX_STRANGERS);
        end(**std::find_if(sessions.begin(), sessions.end(), is_stranger));
    }
    sessions.push_back(std::make_shared<Session>());
    sessions.back()->socket = std::move(socket);
}

// Receives a part of what has arrived, so that the others have a turn.
void Listener::receive(Session & session) {
    std::string why;
    int64_t     n = 1;
    for (size_t left = CHUNK; left > 0 && n > 0 && why.empty() && !session.waits; left -= std::min<size_t>(left, n)) {
        try {
            const Place place = place_for(session);
            n                 = receive_some(session.socket, place.to, std::min(left, place.bytes));
            if (n > 0 && !session.cut_off()) {
                why = take(session, n);
            }
        } catch (const std::bad_alloc &) {
            why = "there is no memory for a request as large as its";
        }
    }
    if (n < 0 && !session.joined) {
        why = NOBODY;
    }
    if (n < 0 || !why.empty()) {
        MutexLock lock(mutex);
        if (!why.empty()) {
            refuse(session, why);
        }
        if (n < 0) {
            end(session);
        }
    }
}

// The place for the next bytes. Memory grows with the arrived bytes; for a request, the head is read first.
Listener::Place Listener::place_for(Session & session) {
    if (session.received < sizeof(session.header)) {
        return { (char *) &session.header + session.received, sizeof(session.header) - session.received };
    }
    std::vector<char> & payload = session.payload;
    const size_t        arrived = session.received - sizeof(session.header);
    if (arrived == payload.size() && !session.cut_off()) {
        const bool   is_head = arrived == 0 && session.header.kind == (uint16_t) FrameKind::COMPUTE;
        const size_t size =
            std::min<uint64_t>(session.header.bytes, is_head ? sizeof(ComputeHead) : std::max(2 * arrived, CHUNK));
        payload.reserve(size);
        payload.resize(size);
    }
    if (session.cut_off()) { // its payload was freed
        return { ignored, sizeof(ignored) };
    }
    return { payload.data() + arrived, payload.size() - arrived };
}

// Handles more bytes of a frame. Returns why the connection cannot go on, "" if it can.
std::string Listener::take(Session & session, size_t bytes) {
    session.heard = Clock::now();
    if (session.received == 0 && session.joined) {
        session.begun = session.heard;
    }
    session.received += bytes;
    std::string why;
    try {
        if (session.received == sizeof(session.header)) {
            why = accept_header(session);
        } else if (session.received == sizeof(session.header) + sizeof(ComputeHead) && session.joined) {
            accept_head(session);
        }
        if (why.empty() && session.received == sizeof(session.header) + session.header.bytes) {
            why              = accept_frame(session);
            session.received = 0;
            session.payload  = std::vector<char>();
        }
    } catch (const Failure & failure) {
        why = format("a request cannot be: %s", failure.what());
    }
    return why;
}

std::string Listener::accept_header(Session & session) {
    const FrameHeader & header = session.header;
    const std::string   fault  = fault_of(header);
    if (!fault.empty()) {
        return fault;
    }
    const auto kind = (FrameKind) header.kind;
    if (!session.joined) {
        return kind == FrameKind::HELLO && header.bytes == sizeof(Hello) ? "" : NOBODY;
    }
    if (kind == FrameKind::PING ?
            header.bytes > 0 :
            kind != FrameKind::COMPUTE || header.bytes > max_compute_bytes(config.layers, max_slots)) {
        return format(
            "a frame of kind %d with %llu bytes was not to come", header.kind, (unsigned long long) header.bytes);
    }
    return "";
}

// Handles the head of a request, which needs room from here on. Throws Failure, like accept_frame(), if it is
// impossible.
void Listener::accept_head(Session & session) {
    const ComputeHead head = read_head(session.payload.data(), session.header.bytes, config.layers, max_slots);
    MutexLock         lock(mutex);
    session.room = session.header.bytes + sizeof(FrameHeader) +
        (uint64_t) head.n_slots * config.layers[head.layer].n_out * sizeof(float);
    session.waits     = true;
    session.signed_at = Clock::now();
    waiting.push_back(session.shared_from_this());
    give_room();
}

std::string Listener::accept_frame(Session & session) {
    if (!session.joined) {
        return join(session);
    }
    const bool computes = session.header.kind == (uint16_t) FrameKind::COMPUTE;
    if (computes) {
        read_compute(session.payload.data(), session.payload.size(), config.layers, max_slots);
    }
    {
        MutexLock lock(mutex);
        if (session.requests.size() + session.out.size() >= MAX_QUEUED) {
            return format("more than %d requests at once", MAX_QUEUED);
        }
        if (!computes) {
            send(session, make_frame(FrameKind::PONG, 0, nullptr, 0));
            return "";
        }
        if (session.requests.empty()) {
            turns.push_back(session.shared_from_this());
        }
        session.requests.push_back({ session.header.id, std::move(session.payload), session.room });
        session.room = 0;
    }
    asked.notify_one();
    return "";
}

// Returns why a connecting server does not join, "" if it joins.
std::string Listener::join(Session & session) {
    Hello hello;
    memcpy(&hello, session.payload.data(), sizeof(hello));
    if (!same_text(hello.token, expected.token)) {
        return "its token is another one";
    }
    if (!same_text(hello.model, expected.model) || hello.shape != expected.shape) {
        return "its model is another one";
    }
    session.joined        = true;
    const Welcome welcome = { config.kernels, (uint64_t) max_slots };

    MutexLock lock(mutex);
    ++counters.connections;
    send(session, make_frame(FrameKind::WELCOME, 0, &welcome, sizeof(welcome)));
    return "";
}

void Listener::look_at_clock(Session & session) {
    if (session.ended) {
        return;
    }
    if (session.refused()) {
        if (Clock::now() > session.linger) {
            end(session);
        }
    } else if (session.joined && !session.out.empty() && is_over(session.since, FRAME_MS)) {
        refuse(session, format("it took no answer in %d s", FRAME_MS / 1000));
    } else if (session.waits) { // its pings lie behind the unread request
        if (session.out.empty() && is_over(session.signed_at, SIGN_MS)) {
            session.signed_at = Clock::now();
            send(session, make_frame(FrameKind::PONG, 0, nullptr, 0));
        }
    } else if (!session.joined) {
        if (is_over(session.begun, JOIN_MS)) {
            refuse(session, NOBODY);
        }
    } else if (session.received > 0 && is_over(session.begun, FRAME_MS)) {
        refuse(session, format("a request took more than %d s to come", FRAME_MS / 1000));
    } else if (is_over(session.heard, IDLE_MS)) {
        end(session);
    }
}

// Gives room to waiting requests in their order: small ones do not pass a large one for ever. A connection with half of
// the quota waits for its own answers only. If half of the quota is promised, a request gets room after its first
// bytes. True: a request waits for room that others hold.
bool Listener::give_room() {
    for (auto next = waiting.begin(); next != waiting.end();) {
        Session & session = **next;
        if (!session.cut_off()) {
            const uint64_t rest = session.header.bytes - sizeof(ComputeHead);
            const bool     comes =
                held + session.room <= quota / 2 || bytes_waiting(session.socket) >= std::min<uint64_t>(rest, BEGUN);
            if (session.held + session.room > quota / 2 || !comes) {
                ++next;
                continue;
            }
            if (held + session.room > quota) {
                return true;
            }
            hold(session, session.room);
        }
        session.waits = false;
        session.heard = session.begun = Clock::now();
        next                          = waiting.erase(next);
    }
    return false;
}

// Whether it holds room and makes no progress.
bool Listener::stalls(const Session & session) const {
    const auto is_late = [&](Clock::time_point begun, Clock::time_point moved, uint64_t bytes) {
        return is_over(moved, config.stall_ms) || is_over(begun, config.stall_ms + (int) (bytes / BYTES_MS));
    };
    const bool comes =
        session.room > 0 && !session.waits && is_late(session.begun, session.heard, session.header.bytes);
    const bool goes = !session.out.empty() && is_late(session.since, session.moved, session.out.front().size());
    return !session.cut_off() && (comes || goes);
}

void Listener::make_room() {
    while (give_room()) {
        std::shared_ptr<Session> most;
        for (const auto & session : sessions) {
            most = stalls(*session) && (!most || session->held > most->held) ? session : most;
        }
        if (!most) {
            return;
        }
        refuse(*most, "others wait for the memory that it has for requests and answers, and it did not go on");
    }
}

void Listener::refuse(Session & session, const std::string & why) {
    if (session.cut_off()) {
        return;
    }
    ++counters.refused;
    sentence = why;
    if (session.sent > 0) { // a sentence inside an answer could not be read
        end(session);
        return;
    }
    release(session);
    session.linger = Clock::now() + milliseconds(LINGER_MS);
    send(session, make_frame(FrameKind::REFUSED, 0, why));
}

void Listener::end(Session & session) {
    session.ended = true;
    release(session);
    session.socket.close();
}

void Listener::hold(Session & session, int64_t bytes) {
    session.held += bytes;
    held += bytes;
}

void Listener::release(Session & session) {
    session.payload = std::vector<char>();
    session.requests.clear();
    session.out.clear();
    session.sent  = 0;
    session.room  = 0;
    session.waits = false;
    hold(session, -(int64_t) session.held);
}

void Listener::send(Session & session, Frame frame) {
    hold(session, frame.capacity());
    session.out.push_back(std::move(frame));
    if (session.out.size() == 1) {
        session.since = session.moved = Clock::now();
        flush(session);
    }
}

// Sends a part of the output, as much as goes without waiting, so that the others have a turn. The end of a connection
// is noticed at the next read.
void Listener::flush(Session & session) {
    for (size_t left = CHUNK; left > 0 && !session.out.empty();) {
        const Frame & first = session.out.front();
        const size_t  size  = std::min<size_t>(left, first.size() - session.sent);
        const int64_t n     = send_some(session.socket, first.data() + session.sent, size);
        if (n <= 0) {
            return;
        }
        left -= n;
        session.sent += n;
        session.moved = Clock::now();
        if (session.sent == first.size()) {
            hold(session, -(int64_t) first.capacity());
            session.out.pop_front();
            session.sent  = 0;
            session.since = session.moved;
        }
    }
    if (session.out.empty() && session.refused()) {
        shutdown(session.socket.fd(), SHUT_WR);
    }
}

void Listener::compute_all() {
    for (;;) {
        place_thread(true);
        std::shared_ptr<Session> session;
        Request                  request;
        {
            MutexLock lock(mutex);
            asked.wait(mutex, [&]() REQUIRES(mutex) { return stopping || !turns.empty(); });
            if (stopping) {
                return;
            }
            session = std::move(turns.front());
            turns.pop_front();
            if (session->requests.empty()) { // it was closed
                continue;
            }
            request = std::move(session->requests.front());
            session->requests.pop_front();
            if (!session->requests.empty()) {
                turns.push_back(session);
            }
        }
        const ExpertRows rows   = read_compute(request.payload.data(), request.payload.size(), config.layers);
        const uint64_t   bytes  = (uint64_t) rows.n_slots * config.layers[rows.layer].n_out * sizeof(float);
        const uint64_t   begin  = clock_ns();
        Frame            frame  = make_frame(FrameKind::COMPUTED, request.id, nullptr, 0);
        bool             failed = false;
        try {
            set_header(frame, request.id, bytes);
            compute(rows, (float *) (frame.data() + sizeof(FrameHeader)));
            if (rows.type == RowType::BF16) {
                narrow(frame);
            }
        } catch (const std::exception & failure) {
            failed = true;
            frame  = make_frame(FrameKind::FAILED, request.id, failure.what());
        }
        MutexLock lock(mutex);
        ++counters.requests;
        counters.failed += failed;
        counters.slots += rows.n_slots;
        counters.compute_ns += clock_ns() - begin;
        if (!session->cut_off()) {
            hold(*session, -(int64_t) request.room); // the answer's part stays
            send(*session, std::move(frame));
        }
        if (!session->out.empty() || !waiting.empty()) { // the connections' thread does the rest
            waker.wake();
        }
    }
}

} // namespace pyorch
