// Servers that ask each other, while some of them stop, come back, and get other experts: every question gets the right
// answer or is known to have failed, and nothing is left waiting.

#include "cluster/listener.h"
#include "cluster/remote_bank.h"
#include "cluster/replicas.h"

#include "base/status.h"
#include "check.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <random>
#include <sys/socket.h>

using namespace pyorch;

static const std::vector<LayerShape> LAYERS = { { 8, 16, 12 }, { 4, 16, 12 } };

static float output_of(int layer, int expert, float input, float weight, int i) {
    return (float) (100 * layer + 10 * expert + i) + input * weight;
}

static void compute(const ExpertRows & rows, float * outputs) {
    const LayerShape & shape = LAYERS[rows.layer];
    std::vector<float> inputs(shape.n_in);
    for (int s = 0; s < rows.n_slots; ++s) {
        rows.copy_inputs(s, inputs.data());
        for (int i = 0; i < shape.n_out; ++i) {
            outputs[s * shape.n_out + i] = output_of(rows.layer, rows.expert[s], inputs[i], rows.weight[s], i);
        }
        if (inputs[0] == 0) {
            throw Failure(PYORCH_IO, "this cannot be read");
        }
    }
}

static ListenerConfig listener_config(int port) { return { { "127.0.0.1", port, "token", "model", 7, 9 }, LAYERS }; }

static PeerConfig peer_config(int port) { return { { "127.0.0.1", port, "token", "model", 7, 9 }, 60000 }; }

struct Asked {
    uint64_t answered = 0, failed = 0, elsewhere = 0;
};

// A ubatch of a layer, as the stages and the node behind the experts go through it.
static void ask(RemoteBank & bank, std::mt19937 & random, bool fails, Asked & asked) {
    const int            layer = (int) (random() % 2), n_tokens = 1 + (int) (random() % 40), n_used = 3;
    const LayerShape &   shape = LAYERS[layer];
    std::vector<int32_t> experts(n_tokens * n_used);
    std::vector<float>   weights(n_tokens * n_used), inputs(n_tokens * shape.n_in);
    for (auto & e : experts) {
        e = (int32_t) (random() % shape.n_expert);
    }
    for (auto & w : weights) {
        w = (float) (random() % 7);
    }
    for (auto & x : inputs) {
        x = fails ? 0.0f : (float) (1 + random() % 100);
    }
    std::vector<uint8_t> elsewhere, here(shape.n_expert);
    here[random() % shape.n_expert] = 1;
    const ReadCost read             = { 0, (double) (random() % 3) * 1e-4 };
    auto           rows =
        bank.send(layer, n_tokens, n_used, experts.data(), weights.data(), inputs.data(), here, read, elsewhere);
    for (RemoteRows & r : rows) {
        for (int slot : r.slots) {
            CHECK(elsewhere[experts[slot]] && !here[experts[slot]]);
        }
        asked.elsewhere += r.slots.size();
        if (!r.answer->wait()) {
            ++asked.failed;
            continue;
        }
        ++asked.answered;
        CHECK(!fails && r.answer->rows.size() == r.slots.size() * shape.n_out);
        for (size_t s = 0; s < r.slots.size(); ++s) {
            const int slot = r.slots[s];
            for (int i = 0; i < shape.n_out; ++i) {
                CHECK(r.answer->rows[s * shape.n_out + i] ==
                    output_of(layer, experts[slot], inputs[slot / n_used * shape.n_in + i], weights[slot], i));
            }
        }
    }
}

static void place(RemoteBank & bank, const std::vector<int> & peers, std::mt19937 & random) {
    for (size_t layer = 0; layer < LAYERS.size(); ++layer) {
        std::vector<int> to(2 * LAYERS[layer].n_expert);
        for (int & peer : to) {
            const size_t i = random() % (peers.size() + 1);
            peer           = i < peers.size() ? peers[i] : -1;
        }
        bank.place((int) layer, to, 2);
    }
}

static void test_many_ask_while_servers_come_and_go() {
    auto      first   = std::make_unique<Listener>(listener_config(0), compute);
    auto      second  = std::make_unique<Listener>(listener_config(0), compute);
    const int ports[] = { first->port(), second->port() };

    RemoteBank            bank(LAYERS);
    std::atomic<uint64_t> changes{ 0 };
    bank.on_change([&](int layer, const std::vector<uint8_t> & elsewhere) {
        CHECK((int) elsewhere.size() == LAYERS[layer].n_expert);
        ++changes;
    });
    const std::vector<int> peers = { bank.connect(peer_config(ports[0])), bank.connect(peer_config(ports[1])) };
    std::mt19937           random(1);
    place(bank, peers, random);

    std::atomic<bool>        stop{ false };
    std::vector<Asked>       asked(4);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            std::mt19937 own(100 + t);
            while (!stop) {
                ask(bank, own, own() % 50 == 0, asked[t]);
            }
        });
    }
    for (int round = 0; round < 4; ++round) {
        second.reset();
        place(bank, peers, random);
        second = std::make_unique<Listener>(listener_config(ports[1]), compute);
        while (!bank.peer(peers[1])->joined()) {
            std::this_thread::yield();
        }
        place(bank, peers, random);
        const uint64_t before = first->counts().requests;
        while (first->counts().requests < before + 20) {
            place(bank, { peers[0] }, random);
        }
    }
    const int third = bank.connect(peer_config(ports[0]));
    bank.disconnect(peers[0]);
    place(bank, { third }, random);
    stop = true;
    for (auto & thread : threads) {
        thread.join();
    }
    uint64_t answered = 0, elsewhere = 0;
    for (const Asked & a : asked) {
        answered += a.answered;
        elsewhere += a.elsewhere;
    }
    CHECK(answered > 80 && changes > 0);
    CHECK(bank.counts().slots == elsewhere);
    const uint64_t times_lost = bank.peer(peers[1])->counts().times_lost;
    CHECK(bank.peer(third)->joined() && times_lost >= 1 && times_lost <= 4);
    CHECK(first->counts().refused == 0 && first->error().empty());
}

// One slot for each of so many tokens, the experts of layer 0 in turn, from the first.
static std::vector<RemoteRows> send_some(RemoteBank & bank, int n_tokens, int n_experts, const ReadCost & read) {
    std::vector<int32_t> experts(n_tokens);
    std::vector<float>   weights(n_tokens, 1.0f), inputs(n_tokens * LAYERS[0].n_in, 1.0f);
    for (int t = 0; t < n_tokens; ++t) {
        experts[t] = t % n_experts;
    }
    std::vector<uint8_t> elsewhere;
    auto                 rows    = bank.send(0, n_tokens, 1, experts.data(), weights.data(), inputs.data(),
        std::vector<uint8_t>(LAYERS[0].n_expert), read, elsewhere);
    size_t               n_slots = 0;
    for (RemoteRows & r : rows) {
        CHECK(r.answer->wait());
        n_slots += r.slots.size();
    }
    CHECK(n_slots == 0 || n_slots == (size_t) n_tokens);
    CHECK(std::any_of(elsewhere.begin(), elsewhere.end(), [](uint8_t e) { return e; }) == !rows.empty());
    return rows;
}

static void test_what_is_read_sooner_than_a_server_answers_is_not_asked_for() {
    Listener   listener(listener_config(0), [](const ExpertRows & rows, float * outputs) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        compute(rows, outputs);
    });
    RemoteBank bank(LAYERS);
    const int  peer = bank.connect(peer_config(listener.port()));
    bank.place(0, std::vector<int>(8, peer), 1);
    const ReadCost unknown = {}, fast = { 0, 1e-9 }, slow = { 0, 1e9 }, busy = { 1e9, 1e-9 }, wanted = { 0, 1e-9, 1 };

    CHECK(!send_some(bank, 4, 2, fast).empty()); // nobody knows yet how long it takes
    double few = 0, many = 0;
    while (few == 0 || many == 0) { // forgotten, if this thread was away for a tenth of a second
        CHECK(!send_some(bank, 4, 2, unknown).empty());
        few  = bank.peer(peer)->answer_seconds(4);
        many = bank.peer(peer)->answer_seconds(1000);
    }
    CHECK(few >= 0.002 && many >= 0.002);
    while (!send_some(bank, 4, 2, unknown).empty() && bank.peer(peer)->answer_seconds(1 << 20) == 0) {
    }
    CHECK(bank.peer(peer)->answer_seconds(1 << 20) < 60); // of more than anybody takes
    for (const ReadCost & read : { unknown, slow, busy, wanted }) {
        CHECK(!send_some(bank, 4, 2, read).empty());
    }
    CHECK(bank.counts().read == 0);
    while (!send_some(bank, 4, 2, fast).empty()) {
    } // unless this thread was away for so long that it is forgotten
    CHECK(bank.counts().read == 4);

    uint64_t n_read = 4;
    while (send_some(bank, 4, 2, fast).empty()) { // after a while it is tried again
        n_read += 4;
    }
    CHECK(bank.counts().read == n_read && n_read > 4);
}

static void test_what_was_asked_before_is_answered_before() {
    std::atomic<bool> waits{ false };
    Listener          listener(listener_config(0), [&](const ExpertRows & rows, float * outputs) {
        while (waits) {
            std::this_thread::yield();
        }
        compute(rows, outputs);
    });
    RemoteBank        bank(LAYERS);
    const int         peer = bank.connect(peer_config(listener.port()));
    bank.place(0, std::vector<int>(8, peer), 1);
    for (int i = 0; i < 20; ++i) {
        CHECK(!send_some(bank, 4, 2, {}).empty());
    }
    double usual = 0;
    while ((usual = bank.peer(peer)->answer_seconds(4)) == 0) { // forgotten, if this thread was away
        send_some(bank, 4, 2, {});
    }
    waits = true;
    const std::vector<int32_t> experts(4, 1);
    const std::vector<float>   weights(4, 1.0f), inputs(4 * LAYERS[0].n_in, 1.0f);
    std::vector<uint8_t>       elsewhere;
    auto                       rows =
        bank.send(0, 4, 1, experts.data(), weights.data(), inputs.data(), std::vector<uint8_t>(8), {}, elsewhere);
    const auto   begin = Clock::now();
    const double late  = std::max(0.1, 30 * usual);
    while (std::chrono::duration<double>(Clock::now() - begin).count() < late) {
    }
    CHECK(bank.peer(peer)->answer_seconds(4) > late); // it is overdue: as long again, by all that is known
    waits = false;
    CHECK(rows.size() == 1 && rows[0].answer->wait());
    const double next = bank.peer(peer)->answer_seconds(4); // one late answer says little of the next
    CHECK(next < late / 8);                                 // 0: forgotten, if this thread was away
}

static void test_a_request_that_is_much_larger_than_what_the_system_buffers() {
    const std::vector<LayerShape> layers = { { 2, 4096, 4096 } };
    Listener listener({ "127.0.0.1", 0, "token", "model", 7, 9, layers }, [](const ExpertRows & rows, float * outputs) {
        for (int s = 0; s < rows.n_slots; ++s) {
            rows.copy_inputs(s, outputs + s * 4096);
        }
    });
    RemoteBank bank(layers);
    const int  peer = bank.connect(peer_config(listener.port()));
    bank.place(0, { peer, peer }, 1);
    const int            n_tokens = 1500;
    std::vector<int32_t> experts(2 * n_tokens);
    std::vector<float>   weights(2 * n_tokens, 1.0f), inputs(n_tokens * 4096);
    for (size_t i = 0; i < inputs.size(); ++i) {
        inputs[i] = (float) i;
    }
    for (size_t i = 0; i < experts.size(); ++i) {
        experts[i] = (int32_t) (i % 2);
    }
    std::vector<uint8_t> elsewhere;
    auto rows = bank.send(0, n_tokens, 2, experts.data(), weights.data(), inputs.data(), { 0, 0 }, {}, elsewhere);
    CHECK(rows.size() == 1 && rows[0].answer->wait());
    for (int slot = 0; slot < 2 * n_tokens; ++slot) {
        const float * row = rows[0].answer->rows.data() + slot * 4096;
        CHECK(memcmp(row, inputs.data() + slot / 2 * 4096, 4096 * sizeof(float)) == 0);
    }
    const pyorch_peer_info counts = bank.peer(peer)->counts();
    CHECK(counts.bytes_sent < n_tokens * 4096 * sizeof(float) * 1.01); // a row that two experts want is in it once
    CHECK(counts.bytes_received > 2 * n_tokens * 4096 * sizeof(float));
}

static void test_rows_of_two_bytes_a_number() {
    Listener   listener(listener_config(0), compute);
    RemoteBank bank(LAYERS);
    PeerConfig config     = peer_config(listener.port());
    config.rows           = RowType::BF16;
    const int peer        = bank.connect(config);
    const int exactly     = bank.connect(peer_config(listener.port()));
    const int n_tokens    = 50;
    uint64_t  sent[2]     = {};
    uint64_t  received[2] = {};
    CHECK(!bank.peer(peer)->same_bits() && bank.peer(exactly)->same_bits());
    std::vector<int32_t> experts(n_tokens, 2);
    std::vector<float>   weights(n_tokens, 1.0f), inputs(n_tokens * LAYERS[0].n_in);
    for (size_t i = 0; i < inputs.size(); ++i) {
        inputs[i] = 1.001f + (float) i;
    }
    for (int number : { peer, exactly }) {
        bank.place(0, std::vector<int>(8, number), 1);
        const pyorch_peer_info before = bank.peer(number)->counts();
        std::vector<uint8_t>   elsewhere;
        auto                   rows = bank.send(
            0, n_tokens, 1, experts.data(), weights.data(), inputs.data(), std::vector<uint8_t>(8), {}, elsewhere);
        CHECK(rows.size() == 1 && rows[0].answer->wait());
        const std::vector<float> & answer = rows[0].answer->rows;
        bool                       exact  = true;
        for (int slot = 0; slot < n_tokens; ++slot) {
            for (int i = 0; i < LAYERS[0].n_out; ++i) {
                const float right = output_of(0, 2, inputs[slot * LAYERS[0].n_in + i], 1, i);
                const float found = answer[slot * LAYERS[0].n_out + i];
                exact             = exact && found == right;
                CHECK(std::abs(found - right) <= right / 128); // 8 bits, twice
            }
        }
        CHECK(exact == (number == exactly));
        sent[number]     = bank.peer(number)->counts().bytes_sent - before.bytes_sent;
        received[number] = bank.peer(number)->counts().bytes_received - before.bytes_received;
    }
    CHECK(sent[exactly] - sent[peer] == n_tokens * LAYERS[0].n_in * 2ull);
    CHECK(received[exactly] - received[peer] == n_tokens * LAYERS[0].n_out * 2ull);
}

static void test_what_one_request_has_no_room_for_is_in_several() {
    ListenerConfig small = listener_config(0);
    small.quota          = Listener::MIN_REQUESTS * largest_with_answer(LAYERS, 10);
    Listener   listener(small, compute);
    RemoteBank bank(LAYERS);
    const int  peer = bank.connect(peer_config(listener.port()));
    bank.place(0, std::vector<int>(8, peer), 1);
    const std::vector<int32_t> experts = { 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3 };
    const auto                 n       = (int) experts.size();
    std::vector<float>         weights(n, 1.0f), inputs(n * LAYERS[0].n_in, 1.0f);
    std::vector<uint8_t>       elsewhere;
    auto                       rows =
        bank.send(0, n, 1, experts.data(), weights.data(), inputs.data(), std::vector<uint8_t>(8), {}, elsewhere);
    CHECK(rows.size() == 2 && elsewhere[0] && elsewhere[1] && elsewhere[2]);
    CHECK(!elsewhere[3]); // its rows must be together, and are too many
    CHECK(rows[0].slots == std::vector<int>({ 0, 1, 3, 4, 6, 7, 9, 10 }));
    CHECK(rows[1].slots == std::vector<int>({ 2, 5, 8, 11 }));
    CHECK(rows[0].answer->wait() && rows[1].answer->wait());
    CHECK(listener.counts().refused == 0);

    Listener         large(listener_config(0), compute);
    const int        other = bank.connect(peer_config(large.port()));
    std::vector<int> both;
    for (int e = 0; e < 8; ++e) {
        both.insert(both.end(), { peer, other });
    }
    bank.place(0, both, 2); // its replica takes as many
    rows = bank.send(0, n, 1, experts.data(), weights.data(), inputs.data(), std::vector<uint8_t>(8), {}, elsewhere);
    CHECK(elsewhere[3]);
    for (RemoteRows & r : rows) {
        CHECK(r.answer->wait());
    }
    bank.place(0, std::vector<int>(8, peer), 1);

    std::vector<int32_t> thirty(30); // of which two requests may wait
    for (int i = 0; i < 30; ++i) {
        thirty[i] = i / 10;
    }
    weights.assign(30, 1.0f);
    inputs.assign(30 * LAYERS[0].n_in, 1.0f);
    rows = bank.send(0, 30, 1, thirty.data(), weights.data(), inputs.data(), std::vector<uint8_t>(8), {}, elsewhere);
    CHECK(rows.size() == 2 && elsewhere[0] && elsewhere[1] && !elsewhere[2]);
    CHECK(rows[0].answer->wait() && rows[1].answer->wait());
    CHECK(listener.counts().refused == 0);
}

// Every expert is at both servers.
static void test_servers_that_have_the_same_experts_share_the_work() {
    Listener         first(listener_config(0), compute);
    auto             second = std::make_unique<Listener>(listener_config(0), compute);
    RemoteBank       bank(LAYERS);
    const int        peers[] = { bank.connect(peer_config(first.port())), bank.connect(peer_config(second->port())) };
    std::vector<int> both;
    for (int e = 0; e < LAYERS[0].n_expert; ++e) {
        both.insert(both.end(), { peers[e % 2], peers[1 - e % 2], -1 });
    }
    bank.place(0, both, 3);
    const std::vector<int32_t> experts = { 0, 1, 0, 1, 0, 2, 0, 3 }; // 4 rows of one expert, 2, 1 and 1 of others
    const std::vector<float>   weights(8, 1.0f), inputs(4 * LAYERS[0].n_in, 1.0f);
    std::vector<uint8_t>       elsewhere;
    const auto                 send = [&] {
        return bank.send(
            0, 4, 2, experts.data(), weights.data(), inputs.data(), std::vector<uint8_t>(8), {}, elsewhere);
    };
    auto rows = send();
    CHECK(rows.size() == 2 && rows[0].slots.size() == 4 && rows[1].slots.size() == 4);
    CHECK(rows[0].answer->wait() && rows[1].answer->wait());

    second.reset();
    while (bank.peer(peers[1])->joined()) {
        std::this_thread::yield();
    }
    rows = send();
    CHECK(rows.size() == 1 && rows[0].slots.size() == 8 && rows[0].answer->wait());
    CHECK(elsewhere[3] && !elsewhere[4]);
}

static void test_who_is_expected_to_answer_first_is_asked() {
    const std::vector<std::vector<int>> places(12, { 2, 0, 1 });
    const std::vector<int>              slots(12, 2);
    std::vector<pyorch_pace>            paces(3);
    const auto                          count = [&](int peer) {
        const auto chosen = choose_replicas(places, slots, paces);
        return std::count(chosen.begin(), chosen.end(), peer);
    };
    CHECK(count(0) == 4 && count(1) == 4 && count(2) == 4 && choose_replicas(places, slots, paces)[0] == 2);
    for (int i = 0; i < 40; ++i) {
        for (int peer = 0; peer < 3; ++peer) { // one needs twenty times as long for each row
            note_answer(paces[peer], 1 + i % 8, 1e-3 + (1 + i % 8) * (peer == 1 ? 20e-3 : 1e-3));
        }
    }
    CHECK(count(1) < 2 && count(0) > 4 && count(2) > 4);
    paces[0].pending = 1000; // and one is busy
    CHECK(count(0) == 0 && count(2) > count(1));
    for (int i = 0; i < 200; ++i) { // what was long ago fades
        note_answer(paces[2], 1 + i % 8, 1.0);
    }
    CHECK(count(1) == 12);
    CHECK(choose_replicas({ {}, { 1 } }, { 1, 1 }, paces) == std::vector<int>({ -1, 1 }));
}

static void test_who_does_not_join_is_told_why() {
    Listener   listener(listener_config(0), compute);
    RemoteBank bank(LAYERS);
    for (int what = 0; what < 3; ++what) {
        PeerConfig config = peer_config(listener.port());
        (what == 0 ? config.token : config.model) += what < 2 ? "!" : "";
        config.shape += what == 2;
        std::string why;
        try {
            bank.connect(config);
        } catch (const Failure & failure) {
            why = failure.what();
        }
        CHECK(why.find(what == 0 ? "its token is another one" : "its model is another one") != std::string::npos);
    }
    CHECK(listener.counts().refused == 3 && listener.counts().connections == 0);
}

static void test_a_server_that_answers_too_late_is_lost_and_asked_again() {
    std::atomic<bool> waits{ true };
    Listener          listener(listener_config(0), [&](const ExpertRows & rows, float * outputs) {
        while (waits) {
            std::this_thread::yield();
        }
        compute(rows, outputs);
    });
    RemoteBank        bank(LAYERS);
    PeerConfig        config = peer_config(listener.port());
    config.answer_ms         = 300;
    const int peer           = bank.connect(config);
    bank.place(0, std::vector<int>(8, peer), 1);
    const auto asked_and_answered = [&] {
        const std::vector<int32_t> experts = { 1 };
        const std::vector<float>   weights(1, 1.0f), inputs(LAYERS[0].n_in, 1.0f);
        std::vector<uint8_t>       elsewhere;
        auto                       rows =
            bank.send(0, 1, 1, experts.data(), weights.data(), inputs.data(), std::vector<uint8_t>(8), {}, elsewhere);
        return !rows.empty() && rows[0].answer->wait();
    };
    CHECK(!asked_and_answered());
    CHECK(bank.peer(peer)->error().find("takes more than 0.3 s to answer") != std::string::npos);
    waits = false;
    while (!asked_and_answered()) { // also where this machine takes as long
        std::this_thread::yield();
    }
}

// As the node behind the experts goes through what was sent. False: nobody has it.
static bool joined(RemoteBank & bank, int layer, const std::vector<RemoteRows> & sent) {
    std::deque<RemoteRows> all(sent.begin(), sent.end());
    for (; !all.empty(); all.pop_front()) {
        RemoteRows rows = all.front();
        if (bank.wait(layer, rows)) {
            CHECK(rows.answer->rows.size() == rows.slots.size() * LAYERS[layer].n_out);
            continue;
        }
        const auto again = bank.send_again(layer, rows);
        if (again.empty()) {
            return false;
        }
        all.insert(all.end(), again.begin(), again.end());
    }
    return true;
}

// Rows of three experts of layer 0, ten of each.
static std::vector<RemoteRows> send_thirty(RemoteBank & bank) {
    std::vector<int32_t> experts(30);
    for (int i = 0; i < 30; ++i) {
        experts[i] = i / 10;
    }
    const std::vector<float> weights(30, 1.0f), inputs(30 * LAYERS[0].n_in, 1.0f);
    std::vector<uint8_t>     elsewhere;
    return bank.send(0, 30, 1, experts.data(), weights.data(), inputs.data(), std::vector<uint8_t>(8), {}, elsewhere);
}

static const std::vector<std::vector<uint8_t>> ALL_LACK = { std::vector<uint8_t>(8, 1), std::vector<uint8_t>(4, 1) };
static constexpr std::chrono::milliseconds     FOR_EVER = std::chrono::minutes(10), AT_ONCE{ 20 };

static void test_many_who_lack_all_ask_one_at_once_and_nobody_is_refused() {
    std::atomic<bool> waits{ true };
    ListenerConfig    small = listener_config(0);
    small.quota             = Listener::MIN_REQUESTS * largest_with_answer(LAYERS, 10);
    small.stall_ms          = 600000;
    Listener                                 listener(small, [&](const ExpertRows & rows, float * outputs) {
        while (waits) {
            std::this_thread::yield();
        }
        compute(rows, outputs);
    });
    std::vector<std::unique_ptr<RemoteBank>> banks;
    std::vector<std::thread>                 threads;
    for (int b = 0; b < 8; ++b) {
        banks.push_back(std::make_unique<RemoteBank>(LAYERS, ALL_LACK, FOR_EVER));
        banks.back()->place(0, std::vector<int>(8, banks.back()->connect(peer_config(listener.port()))), 1);
        for (int t = 0; t < 2; ++t) { // contexts
            threads.emplace_back([bank = banks.back().get()] { CHECK(joined(*bank, 0, send_thirty(*bank))); });
        }
    }
    const auto n_signs = [&] {
        uint64_t n = 0;
        for (const auto & bank : banks) {
            const pyorch_peer_info info = bank->peer(0)->counts();
            CHECK(info.times_lost == 0);
            n += (info.bytes_received - sizeof(FrameHeader) - sizeof(Welcome)) / sizeof(FrameHeader);
        }
        return n;
    };
    while (n_signs() < 100) { // most of them unasked: a ping is sent every two seconds
        for (const auto & bank : banks) {
            CHECK(bank->peer(0)->pace().pending <= 20); // of both contexts
        }
    }
    waits = false;
    for (auto & thread : threads) {
        thread.join();
    }
    for (const auto & bank : banks) {
        const pyorch_peer_info info = bank->peer(0)->counts();
        CHECK(info.times_lost == 0 && info.failed == 0 && info.slots == 60);
    }
    CHECK(listener.counts().refused == 0 && listener.counts().slots == 8 * 60);
}

static void test_what_is_lacking_waits_for_a_server_that_has_it_and_then_for_no_other_one() {
    Listener   listener(listener_config(0), compute);
    RemoteBank bank(LAYERS, ALL_LACK, FOR_EVER);
    CHECK(bank.active());
    std::thread early([&] { CHECK(joined(bank, 0, send_thirty(bank))); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50)); // it has begun, most likely
    const int peer = bank.connect(peer_config(listener.port()));
    bank.place(0, std::vector<int>(8, peer), 1);
    early.join();
    CHECK(bank.peer(peer)->counts().slots == 30);

    RemoteBank alone(LAYERS, ALL_LACK, AT_ONCE);
    CHECK(!joined(alone, 0, send_thirty(alone)));
    auto      second = std::make_unique<Listener>(listener_config(0), compute);
    const int gone   = alone.connect(peer_config(second->port()));
    alone.place(0, std::vector<int>(8, gone), 1);
    CHECK(joined(alone, 0, send_thirty(alone)));
    second.reset();
    CHECK(!joined(alone, 0, send_thirty(alone)));

    // When a server has been away for longer nobody waits for it: that would hold up all that needs it not.
    RemoteBank away(LAYERS, ALL_LACK, std::chrono::seconds(1));
    second          = std::make_unique<Listener>(listener_config(0), compute);
    const int third = away.connect(peer_config(second->port()));
    away.place(0, std::vector<int>(8, third), 1);
    second.reset();
    while (away.peer(third)->joined()) {
        std::this_thread::yield();
    }
    CHECK(!joined(away, 0, send_thirty(away)));
    const auto begin = Clock::now();
    int        n     = 0;
    while (n < 100 && !joined(away, 0, send_thirty(away))) {
        ++n;
    }
    CHECK(n == 100 && Clock::now() - begin < std::chrono::seconds(50));
}

// Who lets others join, and refuses what it is asked first.
static void refuse_one(const Socket & listening) {
    Socket socket;
    while (!(socket = accept_from(listening)).open()) {
        std::this_thread::yield();
    }
    const auto next = [&] { // frame: its kind
        Frame bytes(sizeof(FrameHeader));
        for (size_t n = 0; n < bytes.size();) {
            const int64_t more = receive_some(socket, bytes.data() + n, bytes.size() - n);
            CHECK(more >= 0);
            n += more;
            if (n == sizeof(FrameHeader)) {
                FrameHeader header;
                memcpy(&header, bytes.data(), sizeof(header));
                bytes.resize(sizeof(header) + header.bytes);
            }
        }
        return (FrameKind) ((const FrameHeader *) bytes.data())->kind;
    };
    const auto put = [&](const Frame & frame) {
        CHECK(send_some(socket, frame.data(), frame.size()) == (int64_t) frame.size());
    };
    CHECK(next() == FrameKind::HELLO);
    const Welcome welcome = { 9, 100 };
    put(make_frame(FrameKind::WELCOME, 0, &welcome, sizeof(welcome)));
    while (next() != FrameKind::COMPUTE) {
    }
    put(make_frame(FrameKind::REFUSED, 0, "there is no room"));
    shutdown(socket.fd(), SHUT_WR); // and not closed: it might still send, and would not read this then
    char ignored[64];
    while (receive_some(socket, ignored, sizeof(ignored)) >= 0) {
    }
}

static void test_what_a_server_refused_is_asked_again_soon_and_its_answer_is_awaited() {
    Socket      listening = listen_at("127.0.0.1", 0);
    const int   port      = port_of(listening);
    RemoteBank  bank(LAYERS, ALL_LACK, FOR_EVER);
    std::thread asks([&] { // it joins before anybody is asked
        bank.place(0, std::vector<int>(8, bank.connect(peer_config(port))), 1);
        CHECK(joined(bank, 0, send_thirty(bank)));
    });
    const auto  begin = Clock::now();
    for (int i = 0; i < 3; ++i) {
        refuse_one(listening);
    }
    listening.close();
    Listener listener(listener_config(port), compute);
    asks.join();
    CHECK(Clock::now() - begin < std::chrono::milliseconds(peer_config(port).answer_ms)); // the ban for who fails
    CHECK(bank.peer(0)->counts().times_lost == 3);
    CHECK(bank.peer(0)->error().find("refuses: there is no room") != std::string::npos);
}

int main() {
    test_many_who_lack_all_ask_one_at_once_and_nobody_is_refused();
    test_what_is_lacking_waits_for_a_server_that_has_it_and_then_for_no_other_one();
    test_what_a_server_refused_is_asked_again_soon_and_its_answer_is_awaited();
    test_a_server_that_answers_too_late_is_lost_and_asked_again();
    test_many_ask_while_servers_come_and_go();
    test_servers_that_have_the_same_experts_share_the_work();
    test_who_is_expected_to_answer_first_is_asked();
    test_what_is_read_sooner_than_a_server_answers_is_not_asked_for();
    test_what_was_asked_before_is_answered_before();
    test_a_request_that_is_much_larger_than_what_the_system_buffers();
    test_rows_of_two_bytes_a_number();
    test_what_one_request_has_no_room_for_is_in_several();
    test_who_does_not_join_is_told_why();
    return 0;
}
