#include "cluster/peer.h"

#include "base/placement.h"
#include "base/status.h"
#include "cluster/replicas.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <poll.h>

namespace pyorch {

using std::chrono::milliseconds;

// Least pause between signs of life for waiting servers: a listener takes twice as long.
static constexpr int SIGN_MS = 50;

bool Answer::wait() {
    MutexLock lock(mutex);
    settled.wait(mutex, [&]() REQUIRES(mutex) { return state != PENDING; });
    return state == HERE;
}

bool Answer::was_lost() {
    MutexLock lock(mutex);
    return state == LOST;
}

void Answer::settle(State as) {
    {
        MutexLock lock(mutex);
        state = as;
    }
    settled.notify_all();
}

Peer::Peer(PeerConfig config_, std::function<void()> changed) :
        config(std::move(config_)), changed(std::move(changed)) {
    hello_of(config);
    thread = std::thread([this] { run(); });
}

Peer::~Peer() {
    stopping = true;
    waker.wake();
    thread.join();
}

std::string Peer::wait_joined() {
    MutexLock lock(mutex);
    tried.wait(mutex, [&]() REQUIRES(mutex) { return has_tried; });
    return is_joined ? "" : sentence;
}

pyorch_peer_info Peer::counts() {
    MutexLock lock(mutex);
    return counters;
}

std::string Peer::error() {
    MutexLock lock(mutex);
    return sentence;
}

Clock::time_point Peer::lost_since() {
    MutexLock lock(mutex);
    return lost_at;
}

int64_t Peer::pending() const {
    int64_t n = 0;
    for (const auto & [id, one] : questions) {
        n += one.n_slots;
    }
    return n;
}

int64_t Peer::room() {
    MutexLock lock(mutex);
    return (int64_t) MOST_WAITING * most_slots - pending();
}

bool Peer::has_room_for(int n_slots) const {
    return questions.empty() || pending() + n_slots <= (int64_t) MOST_WAITING * most_slots;
}

std::shared_ptr<Answer> Peer::ask(std::shared_ptr<Frame> frame, int n_slots, int n_out) {
    MutexLock lock(mutex);
    return has_room_for(n_slots) ? send(std::move(frame), n_slots, n_out) : nullptr;
}

std::shared_ptr<Answer> Peer::ask_in_turn(std::shared_ptr<Frame> frame, int n_slots, int n_out) {
    MutexLock lock(mutex);
    answered_some.wait(mutex, [&]() REQUIRES(mutex) { return !is_joined || has_room_for(n_slots); });
    return send(std::move(frame), n_slots, n_out);
}

std::shared_ptr<Answer> Peer::send(std::shared_ptr<Frame> frame, int n_slots, int n_out) {
    if (!is_joined) {
        return nullptr;
    }
    set_header(*frame, ++last_id, frame->size() - sizeof(FrameHeader));
    auto asked         = std::make_shared<Answer>();
    questions[last_id] = { asked, (uint64_t) n_slots * n_out, n_slots, Clock::now() };
    ++counters.requests;
    counters.slots += n_slots;
    push(std::move(frame));
    return asked;
}

static double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

size_t Peer::pace_of(int n_slots) {
    size_t log = 0;
    while ((n_slots >> (log + 1)) > 0) {
        ++log;
    }
    return std::min(log, N_PACES - 1);
}

// The pace of answers with similar numbers of slots; or of more slots (the pace of fewer would be too short). Null:
// unknown.
const Peer::Pace * Peer::known_pace(int n_slots) const {
    const size_t wanted = pace_of(n_slots);
    for (size_t i = wanted; i < paces.size(); ++i) {
        if (paces[i].seconds > 0) {
            return &paces[i];
        }
    }
    for (size_t i = wanted; i-- > 0;) {
        if (paces[i].seconds > 0) {
            return &paces[i];
        }
    }
    return nullptr;
}

double Peer::answer_seconds(int n_slots) {
    MutexLock    lock(mutex);
    const Pace * found   = known_pace(n_slots);
    double       seconds = found ? found->seconds : 0;
    if (!questions.empty()) { // they are answered first; the oldest may be overdue
        const Question & oldest = questions.begin()->second;
        const Pace *     usual  = known_pace(oldest.n_slots);
        const double     waits  = seconds_since(oldest.since);
        seconds += usual && usual->seconds > waits ? usual->seconds - waits : waits;
    } else if (found && seconds_since(found->since) > FORGOTTEN * seconds) {
        seconds = 0;
    }
    return seconds;
}

pyorch_pace Peer::pace() {
    MutexLock   lock(mutex);
    pyorch_pace known = overall;
    if (seconds_since(answered) * known.answers > FORGOTTEN * known.seconds) {
        known = {};
    }
    known.pending += (double) pending();
    return known;
}

void Peer::note_pace(const Question & last) {
    Pace &       pace    = paces[pace_of(last.n_slots)];
    const double seconds = seconds_since(last.since);
    // After a long pause, a faster answer replaces the old pace. A slower one may be an exception.
    const double idle = std::chrono::duration<double>(last.since - pace.since).count();
    pace.seconds      = pace.seconds > 0 && (seconds > pace.seconds || idle <= FORGOTTEN * pace.seconds) ?
        pace.seconds * std::pow(seconds / pace.seconds, 1.0 / 8) :
        seconds;
    pace.since        = Clock::now();
    answered          = pace.since;
    note_answer(overall, last.n_slots, seconds);
}

void Peer::push(std::shared_ptr<Frame> frame) {
    counters.bytes_sent += frame->size();
    out.push_back({ std::move(frame), 0 });
    if (out.size() == 1) {
        flush();
    }
    if (!out.empty()) {
        waker.wake();
    }
}

// Sends as much as goes without waiting. The receiving part notices the end of a connection.
void Peer::flush() {
    while (!out.empty()) {
        Outgoing &    first = out.front();
        const int64_t n     = send_some(socket, first.frame->data() + first.sent, first.frame->size() - first.sent);
        if (n <= 0) {
            return;
        }
        first.sent += n;
        if (first.sent == first.frame->size()) {
            out.pop_front();
        }
    }
}

void Peer::run() {
    while (!stopping) {
        place_thread(false);
        std::string why;
        try {
            why = live();
        } catch (const std::exception & e) {
            why = e.what();
        }
        lose(why);
        if (cut_off) {
            return;
        }
        const int  longest = std::max(config.answer_ms, PAUSE_MS);
        const int  pause   = overloaded ? longest : std::min(longest, PAUSE_MS << std::clamp(refusals - 1, 0, 16));
        const auto again   = Clock::now() + milliseconds(pause);
        overloaded         = false;
        while (!stopping && Clock::now() < again) {
            pollfd p = { waker.fd(), POLLIN, 0 };
            poll(&p, 1, (int) std::chrono::ceil<milliseconds>(again - Clock::now()).count());
            waker.drain();
        }
    }
}

// No answer will come to the pending questions.
void Peer::lose(const std::string & why) {
    std::map<uint64_t, Question> unanswered;
    bool                         was_joined;
    {
        MutexLock lock(mutex);
        was_joined = is_joined.exchange(false);
        unanswered.swap(questions);
        counters.failed += unanswered.size() + (question.answer != nullptr);
        counters.times_lost += was_joined;
        out.clear();
        socket.close();
        sentence  = format("server %s:%d %s", config.address.c_str(), config.port, why.c_str());
        lost_at   = was_joined ? Clock::now() : lost_at;
        has_tried = true;
    }
    answered_some.notify_all();
    if (question.answer) {
        question.answer->settle(Answer::LOST);
        question = {};
    }
    for (auto & one : unanswered) {
        one.second.answer->settle(Answer::LOST);
    }
    tried.notify_all();
    if (was_joined) {
        changed();
    }
}

std::string Peer::rubbish(const std::string & what) {
    cut_off = true;
    return "was cut off: " + what;
}

// Joins, and works until the connection ends. Returns the reason.
std::string Peer::live() {
    Socket            connected;
    const std::string refusal = connect_to(config.address, config.port, config.timeout_ms, waker, connected);
    if (!refusal.empty()) {
        return "cannot be reached: " + refusal;
    }
    received   = 0;
    in_payload = false;
    n_pings    = 0;
    n_pongs    = 0;
    last_heard = Clock::now();
    {
        const Hello hello = hello_of(config);
        MutexLock   lock(mutex);
        socket = std::move(connected);
        push(std::make_shared<Frame>(make_frame(FrameKind::HELLO, 0, &hello, sizeof(hello))));
    }
    const milliseconds beat(std::clamp(config.timeout_ms / 3, 1, MAX_BEAT_MS));
    auto               last_beat = last_heard;
    while (!stopping) {
        bool waits, too_long = false;
        {
            MutexLock lock(mutex);
            waits = !out.empty();
            if (!questions.empty()) { // ids ascend, so the first is the oldest
                too_long = Clock::now() - questions.begin()->second.since > milliseconds(config.answer_ms);
            }
        }
        if (too_long) {
            overloaded = true;
            return format("takes more than %g s to answer", config.answer_ms / 1e3);
        }
        pollfd fds[] = { { socket.fd(), (short) (waits ? POLLIN | POLLOUT : POLLIN), 0 }, { waker.fd(), POLLIN, 0 } };
        poll(fds, 2, (int) beat.count());
        if (fds[1].revents) {
            waker.drain();
        }
        if (fds[0].revents & POLLOUT) {
            MutexLock      lock(mutex);
            const size_t   before = out.size();
            const uint64_t sent   = before ? out.front().sent : 0;
            flush();
            if (out.size() != before || (before && out.front().sent != sent)) {
                last_heard = Clock::now(); // it receives the rest
            }
        }
        if (fds[0].revents & (POLLIN | POLLHUP | POLLERR)) {
            const std::string why = receive();
            if (!why.empty()) {
                return why;
            }
        }
        const auto now = Clock::now();
        if (now - last_heard > milliseconds(config.timeout_ms)) {
            return format("said nothing for %d ms", config.timeout_ms);
        }
        if (is_joined && now - last_beat >= beat) {
            last_beat = now;
            ++n_pings;
            MutexLock lock(mutex);
            push(std::make_shared<Frame>(make_frame(FrameKind::PING, 0, nullptr, 0)));
        }
    }
    return "is not asked any more";
}

// Whether the rows are received at their final place.
bool Peer::is_as_it_is() const { return header.kind == (uint16_t) FrameKind::COMPUTED && config.rows == RowType::F32; }

// Receives what has arrived. Returns why the connection cannot go on, "" if it can.
std::string Peer::receive() {
    for (;;) {
        char *   to   = (char *) &header;
        uint64_t size = sizeof(header);
        if (in_payload) {
            to   = is_as_it_is() ? (char *) question.answer->rows.data() : payload.data();
            size = header.bytes;
        }
        if (received < size) {
            const int64_t n = receive_some(socket, to + received, size - received);
            if (n < 0) {
                return errno ? format("was lost: %s", strerror(errno)) : "closed the connection";
            }
            if (n == 0) {
                return "";
            }
            received += n;
            last_heard = Clock::now();
            MutexLock lock(mutex);
            counters.bytes_received += n;
        }
        if (received < size) {
            continue;
        }
        const std::string why = in_payload ? accept_payload() : accept_header();
        if (!why.empty()) {
            return why;
        }
        received   = 0;
        in_payload = !in_payload;
    }
}

std::string Peer::accept_header() {
    const std::string fault = fault_of(header);
    if (!fault.empty()) {
        return rubbish(fault);
    }
    const auto kind     = (FrameKind) header.kind;
    const bool says_why = kind == FrameKind::REFUSED || kind == FrameKind::FAILED;
    const bool joins    = kind == FrameKind::WELCOME || kind == FrameKind::REFUSED;
    const bool answers  = kind == FrameKind::COMPUTED || kind == FrameKind::FAILED || kind == FrameKind::PONG;
    if (is_joined ? !answers && kind != FrameKind::REFUSED : !joins) {
        return rubbish(format("a frame of kind %d was not to come", header.kind));
    }
    if (kind == FrameKind::PONG) { // endless pongs would leave no time for other work
        const auto n_signs = (uint64_t) ((Clock::now() - joined_at) / milliseconds(SIGN_MS));
        if (n_pongs++ == n_pings + n_signs) {
            return rubbish("it answers what it was not asked");
        }
    }
    uint64_t bytes = kind == FrameKind::WELCOME ? sizeof(Welcome) : 0;
    if (kind == FrameKind::COMPUTED || kind == FrameKind::FAILED) {
        MutexLock  lock(mutex);
        const auto found = questions.find(header.id);
        if (found == questions.end()) {
            return rubbish("it answers what it was not asked");
        }
        question = found->second;
        bytes    = question.n_numbers * bytes_of(config.rows);
        questions.erase(found);
        answered_some.notify_all();
    }
    if (says_why ? header.bytes > MAX_SENTENCE : header.bytes != bytes) {
        return rubbish(format("a frame of kind %d with %llu bytes", header.kind, (unsigned long long) header.bytes));
    }
    if (kind == FrameKind::COMPUTED) {
        question.answer->rows.resize(question.n_numbers);
    }
    payload.resize(is_as_it_is() ? 0 : header.bytes);
    return "";
}

std::string Peer::accept_payload() {
    switch ((FrameKind) header.kind) {
    case FrameKind::WELCOME: {
        Welcome welcome;
        memcpy(&welcome, payload.data(), sizeof(welcome));
        has_same_kernels = welcome.kernels == config.kernels;
        most_slots       = (int) std::clamp<uint64_t>(welcome.max_slots, 1, ExpertRows::MAX_SLOTS);
        {
            MutexLock lock(mutex);
            is_joined = true;
            has_tried = true;
        }
        joined_at = Clock::now();
        tried.notify_all();
        changed();
        break;
    }
    case FrameKind::REFUSED:
        if (is_joined) {
            ++refusals;
        } else {
            cut_off = true;
        }
        return "refuses: " + sentence_of(payload.data(), header.bytes);
    case FrameKind::COMPUTED: {
        if (!is_as_it_is()) {
            widen(payload.data(), question.answer->rows);
        }
        {
            MutexLock lock(mutex);
            note_pace(question);
        }
        refusals = 0;
        question.answer->settle(Answer::HERE);
        question = {};
        break;
    }
    case FrameKind::FAILED: {
        refusals = 0;
        question.answer->settle(Answer::FAILED);
        question = {};
        MutexLock lock(mutex);
        ++counters.failed;
        sentence = format(
            "server %s:%d: %s", config.address.c_str(), config.port, sentence_of(payload.data(), header.bytes).c_str());
        break;
    }
    default: break;
    }
    return "";
}

} // namespace pyorch
