// Who joins and means harm, or is slow: it costs its own connection, and nobody else's answer.

#include "cluster/listener.h"

#include "base/status.h"
#include "check.h"

#include <algorithm>
#include <arpa/inet.h>
#include <atomic>
#include <cstring>
#include <fstream>
#include <future>
#include <numeric>
#include <unistd.h>

using namespace pyorch;

static const LayerShape              SHAPE  = { 2, 2048, 2048 };
static const std::vector<LayerShape> LAYERS = { SHAPE };

static ListenerConfig config() { return { { "127.0.0.1", 0, "token", "model", 7, 9 }, LAYERS }; }

// The answer is the input, and the weight of a request its name.
static void compute(const ExpertRows & rows, float * outputs) {
    for (int s = 0; s < rows.n_slots; ++s) {
        rows.copy_inputs(s, outputs + (size_t) s * SHAPE.n_out);
    }
}

// A connection that does what it is told and waits as long as it takes.
class Client {
public:
    explicit Client(int port, bool joins = true) : connection(::socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in at     = {};
        at.sin_family      = AF_INET;
        at.sin_port        = htons((uint16_t) port);
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        CHECK(connect(connection.fd(), (sockaddr *) &at, sizeof(at)) == 0);
        if (joins) {
            say_hello();
            CHECK(next() == FrameKind::WELCOME);
        }
    }

    void say_hello() {
        const Hello hello = hello_of(config());
        put(make_frame(FrameKind::HELLO, 0, &hello, sizeof(hello)));
    }

    // False: the listener takes no more.
    bool put(const char * data, size_t bytes) {
        while (bytes > 0) {
            const ssize_t n = send(connection.fd(), data, bytes, MSG_NOSIGNAL);
            if (n <= 0) {
                return false;
            }
            data += n;
            bytes -= n;
        }
        return true;
    }
    bool put(const Frame & frame) { return put(frame.data(), frame.size()); }

    // The kind of the next frame, 0 where the connection ended before it.
    FrameKind next() {
        if (!get((char *) &header, sizeof(header))) {
            return FrameKind(0);
        }
        payload.resize(header.bytes);
        return get(payload.data(), payload.size()) ? (FrameKind) header.kind : FrameKind(0);
    }

    // The same without signs of life, which come while a request waits for room.
    FrameKind answer() {
        FrameKind kind;
        while ((kind = next()) == FrameKind::PONG) {
            ++n_signs;
        }
        return kind;
    }

    void shut() { shutdown(connection.fd(), SHUT_RDWR); }

    FrameHeader       header;
    std::vector<char> payload;
    std::atomic<int>  n_signs{ 0 };

private:
    Socket connection;

    bool get(char * to, size_t bytes) {
        return bytes == 0 || recv(connection.fd(), to, bytes, MSG_WAITALL) == (ssize_t) bytes;
    }
};

// For n_slots rows of the first expert.
static Frame request(uint64_t id, int n_slots, float name = 1) {
    std::vector<int32_t> experts(n_slots);
    std::vector<float>   weights(n_slots, name), inputs((size_t) n_slots * SHAPE.n_in, (float) id);
    std::vector<int>     slots(n_slots);
    for (int s = 0; s < n_slots; ++s) {
        slots[s] = s;
    }
    Frame frame = make_compute(0, 1, SHAPE.n_in, slots, experts.data(), weights.data(), inputs.data());
    set_header(frame, id, frame.size() - sizeof(FrameHeader));
    return frame;
}

static bool is_answer(const Client & client, uint64_t id, int n_slots) {
    const float input = (float) id;
    return client.header.id == id && client.payload.size() == n_slots * SHAPE.n_out * sizeof(float) &&
        memcmp(client.payload.data() + client.payload.size() - sizeof(input), &input, sizeof(input)) == 0;
}

static bool answers(Client & client, uint64_t id, int n_slots = 1) {
    return client.put(request(id, n_slots)) && client.answer() == FrameKind::COMPUTED && is_answer(client, id, n_slots);
}

static uint64_t resident_bytes() {
    uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages >> pages;
    return pages * sysconf(_SC_PAGESIZE);
}

static void test_headers_alone_take_no_memory() {
    Listener       listener(config(), compute);
    Client         honest(listener.port()), first(listener.port()), second(listener.port()), third(listener.port());
    const uint64_t before = resident_bytes();
    FrameHeader    header;
    header.kind  = (uint16_t) FrameKind::COMPUTE;
    header.bytes = max_compute_bytes(LAYERS);
    for (Client * client : { &first, &second, &third }) {
        CHECK(client->put((const char *) &header, sizeof(header)));
    }
    for (int i = 0; i < 100; ++i) { // by then all of it has been looked at
        CHECK(answers(honest, i));
    }
    CHECK(resident_bytes() < before + max_compute_bytes(LAYERS) / 2);
}

static void test_who_does_not_read_its_answer_delays_nobody() {
    Listener  listener(config(), compute);
    Client    slow(listener.port()), honest(listener.port());
    const int n_slots = ExpertRows::MAX_SLOTS; // 32 MiB: more than the system takes
    CHECK(slow.put(request(1, n_slots)));
    while (listener.counts().requests == 0) {
        std::this_thread::yield();
    }
    CHECK(answers(honest, 2));
    CHECK(slow.next() == FrameKind::COMPUTED && is_answer(slow, 1, n_slots)); // it was not cut off before that
    CHECK(listener.counts().refused == 0);
}

static void test_who_holds_most_goes_where_memory_is_used_up() {
    const int      n_slots = 1024;
    ListenerConfig small   = config();
    small.quota            = Listener::MIN_REQUESTS * largest_with_answer(LAYERS, n_slots);
    small.stall_ms         = 100;
    Listener                             listener(small, compute);
    Client                               honest(listener.port());
    std::vector<std::unique_ptr<Client>> halves; // of requests, together more than the quota
    const Frame                          large = request(1, n_slots / 2);
    for (uint64_t sent = 0; sent < listener.quota + 2 * large.size(); sent += large.size() / 2) {
        halves.push_back(std::make_unique<Client>(listener.port()));
        halves.back()->put(large.data(), large.size() / 2);
        CHECK(answers(honest, 5));
        CHECK(listener.counts().buffer_bytes <= listener.quota);
    }
    while (listener.counts().refused == 0) {
        CHECK(answers(honest, 6));
    }
    CHECK(listener.error().find("others wait for the memory that it has") != std::string::npos);

    const uint64_t before = listener.counts().refused; // answers that are not read are of the same quota
    const Frame    larger = request(2, n_slots);
    halves.clear();
    std::vector<std::future<void>> sent;
    for (int i = 0; i < 3; ++i) { // together more than it, though none has more than half
        halves.push_back(std::make_unique<Client>(listener.port()));
        sent.push_back(std::async(std::launch::async, [&larger, &client = *halves.back()] {
            while (client.put(larger)) {
            }
        }));
    }
    while (listener.counts().refused == before) {
        CHECK(answers(honest, 7));
        CHECK(listener.counts().buffer_bytes <= listener.quota);
    }
    for (const auto & client : halves) {
        client->shut();
    }
    for (auto & each : sent) {
        each.get();
    }
}

// Eight who each ask for more at once than one may have; all together have room for as much as two.
static void test_requests_for_which_there_is_no_room_are_read_when_there_is_and_signs_of_life_come_meanwhile() {
    const int         n_slots = 10;
    std::atomic<bool> waits{ true };
    ListenerConfig    small = config();
    small.quota             = Listener::MIN_REQUESTS * largest_with_answer(LAYERS, n_slots);
    small.stall_ms          = 600000; // also where this machine takes its time
    Listener                             listener(small, [&](const ExpertRows & rows, float * outputs) {
        while (waits) {
            std::this_thread::yield();
        }
        compute(rows, outputs);
    });
    std::vector<std::unique_ptr<Client>> clients;
    std::vector<std::future<void>>       answered;
    for (int c = 0; c < 8; ++c) {
        clients.push_back(std::make_unique<Client>(listener.port()));
        answered.push_back(std::async(std::launch::async, [&client = *clients.back(), c] {
            const auto sent = std::async(std::launch::async, [&] {
                for (int i = 0; i < 3; ++i) {
                    CHECK(client.put(request(10 * c + i, n_slots)));
                }
            });
            for (int i = 0; i < 3; ++i) {
                CHECK(client.answer() == FrameKind::COMPUTED && is_answer(client, 10 * c + i, n_slots));
            }
        }));
    }
    const auto n_live = [&] {
        return std::count_if(clients.begin(), clients.end(), [](const auto & client) { return client->n_signs > 5; });
    };
    while (n_live() < 8) { // each has one request more than what there is room for
        CHECK(listener.counts().buffer_bytes <= listener.quota);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    waits = false;
    for (auto & each : answered) {
        each.get();
        CHECK(listener.counts().buffer_bytes <= listener.quota);
    }
    CHECK(listener.counts().requests == 24 && listener.counts().refused == 0);
}

static void test_who_asks_most_has_half_of_the_room() {
    std::atomic<bool> waits{ true };
    ListenerConfig    small = config();
    small.quota             = Listener::MIN_REQUESTS * largest_with_answer(LAYERS, 10);
    small.stall_ms          = 600000;
    Listener listener(small, [&](const ExpertRows & rows, float * outputs) {
        while (waits && rows.weight[0] == 1) {
            std::this_thread::yield();
        }
        compute(rows, outputs);
    });
    Client   greedy(listener.port()), honest(listener.port());
    for (int i = 0; i < 4; ++i) {
        CHECK(greedy.put(request(i, 10)));
    }
    CHECK(greedy.next() == FrameKind::PONG && greedy.next() == FrameKind::PONG);
    CHECK(listener.counts().buffer_bytes <= listener.quota / 2);
    CHECK(honest.put(request(1, 10, 2)) && honest.put(make_frame(FrameKind::PING, 0, nullptr, 0)));
    CHECK(honest.next() == FrameKind::PONG); // behind its request, which was read
    CHECK(listener.counts().buffer_bytes > listener.quota / 2);
    waits = false;
    CHECK(honest.next() == FrameKind::COMPUTED && is_answer(honest, 1, 10));
}

// Also of many who only say that a request will come: half of the room stays for those that come.
static void test_heads_alone_keep_nobody_waiting() {
    ListenerConfig small = config();
    small.quota          = Listener::MIN_REQUESTS * largest_with_answer(LAYERS, 100);
    small.stall_ms       = 600000; // none of them is cut off for it
    Listener                             listener(small, compute);
    std::vector<std::unique_ptr<Client>> heads;
    const Frame                          large = request(1, 100);
    for (int i = 0; i < 12; ++i) {
        heads.push_back(std::make_unique<Client>(listener.port()));
        CHECK(heads.back()->put(large.data(), sizeof(FrameHeader) + sizeof(ComputeHead)));
        while (i < 2 && listener.counts().buffer_bytes <= i * listener.quota / 4) { // these have room
            std::this_thread::yield();
        }
    }
    for (const auto & head : heads) { // each was read: it is told that it waits, or has room
        if (head != heads[0] && head != heads[1]) {
            CHECK(head->next() == FrameKind::PONG);
        }
    }
    Client honest(listener.port());
    CHECK(answers(honest, 5, 100) && answers(honest, 6, 1));
    CHECK(listener.counts().refused == 0 && listener.counts().buffer_bytes <= listener.quota / 2);
}

// Others have room that is not used up: who waits for its own answers only gains nothing by their going.
static void test_who_waits_for_its_own_answers_costs_nobody_its_room() {
    std::atomic<bool> waits{ true };
    ListenerConfig    small = config();
    small.quota             = Listener::MIN_REQUESTS * largest_with_answer(LAYERS, 100);
    small.stall_ms          = 1;
    Listener    listener(small, [&](const ExpertRows & rows, float * outputs) {
        while (waits) {
            std::this_thread::yield();
        }
        compute(rows, outputs);
    });
    Client      greedy(listener.port()), slow(listener.port());
    const Frame large = request(1, 100);
    CHECK(slow.put(large.data(), large.size() / 2));
    for (int i = 0; i < 4; ++i) {
        CHECK(greedy.put(request(i, 100)));
    }
    CHECK(greedy.next() == FrameKind::PONG && greedy.next() == FrameKind::PONG); // it waits
    CHECK(listener.counts().refused == 0);
    CHECK(slow.put(large.data() + large.size() / 2, large.size() - large.size() / 2));
    waits = false;
    CHECK(slow.answer() == FrameKind::COMPUTED && is_answer(slow, 1, 100));
    for (int i = 0; i < 4; ++i) {
        CHECK(greedy.answer() == FrameKind::COMPUTED && is_answer(greedy, i, 100));
    }
}

static void test_a_request_is_a_part_of_the_quota_with_its_answer() {
    ListenerConfig small = config();
    small.quota          = Listener::MIN_REQUESTS * largest_with_answer(LAYERS, 100);
    Listener listener(small, compute);
    CHECK(listener.quota == small.quota && listener.max_slots == 100);
    Client  honest(listener.port()), greedy(listener.port());
    Welcome welcome;
    CHECK(honest.payload.size() == sizeof(welcome));
    memcpy(&welcome, honest.payload.data(), sizeof(welcome));
    CHECK(welcome.max_slots == 100);
    for (int i = 0; i < 20; ++i) {
        CHECK(answers(honest, i, 100));
    }
    CHECK(greedy.put(request(1, 101)) && greedy.next() == FrameKind::REFUSED && answers(honest, 1));
    Client      hoping(listener.port()); // that what is said to come is not looked at
    FrameHeader header;
    header.kind  = (uint16_t) FrameKind::COMPUTE;
    header.bytes = max_compute_bytes(LAYERS, 100) + 1;
    CHECK(hoping.put((const char *) &header, sizeof(header)) && hoping.next() == FrameKind::REFUSED);
    Client                     sly(listener.port()); // in few bytes
    const std::vector<int32_t> experts(101);
    const std::vector<float>   weights(101, 1.0f), inputs(SHAPE.n_in, 1.0f);
    std::vector<int>           slots(101);
    std::iota(slots.begin(), slots.end(), 0);
    CHECK(sly.put(make_compute(0, 101, SHAPE.n_in, slots, experts.data(), weights.data(), inputs.data())));
    CHECK(sly.next() == FrameKind::REFUSED && answers(honest, 2));
    small.quota = UINT64_MAX;
    CHECK(Listener(small, compute).max_slots == ExpertRows::MAX_SLOTS);
}

static void test_a_flood_of_requests_is_answered_in_turn_with_others() {
    std::atomic<bool> waits{ true };
    std::vector<int>  order; // of who asks
    Listener          listener(config(), [&](const ExpertRows & rows, float * outputs) {
        while (waits) {
            std::this_thread::yield();
        }
        order.push_back((int) rows.weight[0]);
        compute(rows, outputs);
    });
    Client            flooding(listener.port()), honest(listener.port());
    for (int i = 0; i < 20; ++i) {
        CHECK(flooding.put(request(i, 1, 1)));
    }
    CHECK(flooding.put(make_frame(FrameKind::PING, 0, nullptr, 0)) && flooding.next() == FrameKind::PONG);
    CHECK(honest.put(request(1, 1, 2)));
    CHECK(honest.put(make_frame(FrameKind::PING, 0, nullptr, 0)) && honest.next() == FrameKind::PONG);
    waits = false;
    CHECK(honest.next() == FrameKind::COMPUTED);
    for (int i = 0; i < 20; ++i) {
        CHECK(flooding.next() == FrameKind::COMPUTED && is_answer(flooding, i, 1));
    }
    CHECK(listener.counts().requests == 21 && (order[1] == 2 || order[2] == 2));

    waits = true;
    for (int i = 0; i < 2 * Listener::MAX_QUEUED; ++i) { // so many are too many
        flooding.put(request(i, 1, 1));
    }
    CHECK(flooding.next() == FrameKind::REFUSED && listener.counts().refused == 1);
    waits = false;
    CHECK(answers(honest, 3));
}

static void test_strangers_keep_nobody_out() {
    Listener                             listener(config(), compute);
    std::vector<std::unique_ptr<Client>> clients;
    for (int i = 0; i < 100; ++i) { // silent
        clients.push_back(std::make_unique<Client>(listener.port(), false));
    }
    for (int i = 0; i < 100; ++i) { // and who joins is no stranger
        clients.push_back(std::make_unique<Client>(listener.port()));
    }
    for (int i = 0; i < 100; ++i) {
        CHECK(answers(*clients[100 + i], i));
    }
    CHECK(clients[0]->next() == FrameKind(0));
    clients[99]->put("\0", 1); // half of a word
    CHECK(clients[99]->next() == FrameKind::REFUSED && clients[99]->next() == FrameKind(0));
    CHECK(answers(*clients[100], 1));
}

static void test_a_request_that_comes_twice_is_answered_twice_and_an_old_hello_ends_the_connection() {
    Listener    listener(config(), compute);
    Client      client(listener.port()), honest(listener.port());
    const Frame frame = request(5, 3);
    for (int i = 0; i < 2; ++i) {
        CHECK(client.put(frame));
    }
    for (int i = 0; i < 2; ++i) {
        CHECK(client.next() == FrameKind::COMPUTED && is_answer(client, 5, 3));
    }
    client.say_hello();
    CHECK(client.next() == FrameKind::REFUSED && client.next() == FrameKind(0));
    CHECK(answers(honest, 1));
}

int main() {
    test_headers_alone_take_no_memory();
    test_who_does_not_read_its_answer_delays_nobody();
    test_who_holds_most_goes_where_memory_is_used_up();
    test_requests_for_which_there_is_no_room_are_read_when_there_is_and_signs_of_life_come_meanwhile();
    test_who_asks_most_has_half_of_the_room();
    test_heads_alone_keep_nobody_waiting();
    test_who_waits_for_its_own_answers_costs_nobody_its_room();
    test_a_request_is_a_part_of_the_quota_with_its_answer();
    test_a_flood_of_requests_is_answered_in_turn_with_others();
    test_strangers_keep_nobody_out();
    test_a_request_that_comes_twice_is_answered_twice_and_an_old_hello_ends_the_connection();
    return 0;
}
