#include "api/api.h"
#include "cluster/replicas.h"
#include "pyorch-cluster.h"

#include <algorithm>

using namespace pyorch;

namespace {

// Memory of a listener for requests and their answers, besides the budget: this part of the budget, but at least room
// for a quarter of the slots of a ubatch of 512 tokens with eight experts each. It is not within the budget, because
// placements count on that: an eighth less doubled the reads of servers that lack a fifth of the experts.
constexpr uint64_t QUOTA_OF_BUDGET = 8;
constexpr uint64_t QUOTA_SLOTS     = 1024;

Endpoint endpoint_of(const pyorch_engine * engine, const pyorch_endpoint & at) {
    if (engine->simulated) {
        throw Failure(PYORCH_INVALID, "a simulated engine computes nothing, neither for other servers nor with them");
    }
    return { at.address, at.port, at.token, at.model, engine->shape(), engine->kernels() };
}

} // namespace

extern "C" {

pyorch_status pyorch_listen(pyorch_engine * engine, const pyorch_endpoint * at, int32_t n_threads, int32_t * port) {
    return guarded_outside_callbacks(__func__, [&] {
        ListenerConfig listens = { endpoint_of(engine, *at), engine->remote.layers };
        if (n_threads < 1 || n_threads > 512) {
            throw Failure(
                PYORCH_INVALID, format("%d threads cannot compute for other servers: 1 to 512 can", n_threads));
        }
        MutexLock lock(engine->serving);
        if (engine->server) {
            throw Failure(PYORCH_INVALID, format("it listens already, at port %d", engine->server->listener.port()));
        }
        listens.quota  = std::max(engine->config.budget_bytes / QUOTA_OF_BUDGET,
            Listener::MIN_REQUESTS * largest_with_answer(listens.layers, QUOTA_SLOTS));
        engine->server = std::make_unique<pyorch_engine::Server>(engine->routing, n_threads, listens);
        *port          = engine->server->listener.port();
    });
}

pyorch_status pyorch_stop_listening(pyorch_engine * engine) {
    return guarded_outside_callbacks(__func__, [&] {
        std::unique_ptr<pyorch_engine::Server> ended;
        MutexLock                              lock(engine->serving);
        ended.swap(engine->server); // destroyed without the mutex: it waits for its computations
    });
}

pyorch_status pyorch_get_served(pyorch_engine * engine, pyorch_served * served) {
    return guarded([&] {
        MutexLock lock(engine->serving);
        if (!engine->server) {
            throw Failure(PYORCH_INVALID, "it does not listen: pyorch_listen begins that");
        }
        pyorch_served out = engine->server->listener.counts();
        out.buffer_bytes += engine->server->worker.buffer_bytes();
        copy_text(out.error, engine->server->listener.error());
        *served = out;
    });
}

pyorch_status pyorch_connect(
    pyorch_engine * engine, const pyorch_endpoint * at, int32_t timeout_ms, int32_t rows, int32_t * peer) {
    return guarded_outside_callbacks(__func__, [&] {
        if (timeout_ms < 100 || timeout_ms > 3600 * 1000) {
            throw Failure(
                PYORCH_INVALID, format("a server cannot be lost after %d ms: 100 to 3600000 can be", timeout_ms));
        }
        if (rows != PYORCH_ROWS_F32 && rows != PYORCH_ROWS_BF16) {
            throw Failure(PYORCH_INVALID, format("rows cannot travel as type %d", rows));
        }
        *peer = engine->remote.connect({ endpoint_of(engine, *at), timeout_ms, (RowType) rows });
    });
}

pyorch_status pyorch_disconnect(pyorch_engine * engine, int32_t peer) {
    return guarded_outside_callbacks(__func__, [&] { engine->remote.disconnect(peer); });
}

pyorch_status pyorch_get_peer(pyorch_engine * engine, int32_t peer, pyorch_peer_info * info) {
    return guarded([&] {
        const auto       asked = engine->remote.peer(peer);
        pyorch_peer_info out   = asked->counts();
        out.joined             = asked->joined();
        out.same_kernels       = asked->same_bits();
        copy_text(out.error, asked->error());
        *info = out;
    });
}

pyorch_status pyorch_set_placement(
    pyorch_engine * engine, int32_t il, const int32_t * peers, int32_t n, int32_t n_places) {
    return guarded_outside_callbacks(__func__, [&] {
        const int layer = engine->table.layer_index(il);
        check_experts(engine, layer, n);
        if (n_places < 1) {
            throw Failure(PYORCH_INVALID, format("an expert cannot have %d places", n_places));
        }
        engine->remote.place(layer, std::vector<int>(peers, peers + (size_t) n * n_places), n_places);
    });
}

pyorch_status pyorch_choose_replicas(int32_t n, int32_t n_places, const int32_t * places, const int32_t * slots,
    int32_t n_peers, const pyorch_pace * paces, int32_t * chosen) {
    return guarded([&] {
        std::vector<std::vector<int>> of_experts(n);
        for (int64_t i = 0; i < (int64_t) n * n_places; ++i) {
            if (places[i] >= n_peers) {
                throw Failure(PYORCH_INVALID, format("there is no server %d of %d", places[i], n_peers));
            }
            if (places[i] >= 0) {
                of_experts[i / n_places].push_back(places[i]);
            }
        }
        const auto found = choose_replicas(of_experts, { slots, slots + n }, { paces, paces + n_peers });
        std::copy(found.begin(), found.end(), chosen);
    });
}

pyorch_status pyorch_get_remote_counts(pyorch_engine * engine, pyorch_remote_counts * counts) {
    return guarded([&] { *counts = engine->remote.counts(); });
}

pyorch_status pyorch_allow_reads(pyorch_engine * engine, int32_t allowed) {
    return guarded([&] { engine->remote.allow_reads(allowed != 0); });
}

pyorch_status pyorch_expect_trial(pyorch_engine * engine) {
    return guarded([&] { engine->remote.expect_trial(); });
}

} // extern "C"
