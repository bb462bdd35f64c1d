// Clusters: servers that compute experts for each other.
//
// The rules of pyorch.h hold.

#ifndef PYORCH_CLUSTER_H
#define PYORCH_CLUSTER_H

#include "pyorch.h"

#ifdef __cplusplus
extern "C" {
#endif

// Servers with the same model compute experts for each other. A listening server answers every server that knows its
// token. A connected server sends it rows for the experts placed there, and computes its own meanwhile. The results are
// those of a single server, bit for bit if pyorch_peer_info.same_kernels says so. If a server is lost, the engine
// computes its experts from the model's file, and the request continues.
//
// Numbers and the token are not encrypted: between machines use a private network, or a process that encrypts.

typedef struct pyorch_endpoint {
    const char * address;
    const char * token; // the secret that other servers must know, 1 to 255 bytes
    const char * model; // fingerprint of the model, at most 127 bytes; other servers must have the same
    int32_t      port;  // 0: a free port
} pyorch_endpoint;

// Answers other servers from now on. n_threads: threads that compute for them. port: the port it listens at. It
// computes a layer once a context of the model was made. Experts count in the engine's budget. Requests and answers
// take more memory: an eighth of the budget, or the memory of four requests of 1024 rows times experts with their
// answers if that is more, and at most four of 4096. Requests without room wait. PYORCH_INVALID if it listens already.
pyorch_status pyorch_listen(pyorch_engine * engine, const pyorch_endpoint * at, int32_t n_threads, int32_t * port);

// Stops listening and ends all connections. Does nothing if it does not listen.
pyorch_status pyorch_stop_listening(pyorch_engine * engine);

typedef struct pyorch_served {
    uint64_t connections; // connections that joined
    uint64_t refused;     // connections that were refused or cut off
    uint64_t requests;
    uint64_t failed; // failed requests
    uint64_t slots;  // computed rows times experts
    uint64_t compute_ns;
    char     error[256];   // why a server was refused last, "" if none was
    uint64_t buffer_bytes; // memory outside of the engine's budget: for computing, requests and answers
} pyorch_served;

// Returns counts since it listens. PYORCH_INVALID if it does not listen.
pyorch_status pyorch_get_served(pyorch_engine * engine, pyorch_served * served);

// The type of rows in requests and answers. BF16 halves the bytes and changes the results.
typedef enum pyorch_rows {
    PYORCH_ROWS_F32  = 0,
    PYORCH_ROWS_BF16 = 1,
} pyorch_rows;

// Joins a listening server, and joins it again whenever it is lost. timeout_ms: a server that is silent for so long is
// lost. rows: pyorch_rows. peer: receives its number, from 0. PYORCH_IO with the reason if it cannot be joined now.
pyorch_status pyorch_connect(
    pyorch_engine * engine, const pyorch_endpoint * at, int32_t timeout_ms, int32_t rows, int32_t * peer);

// Leaves a server: its experts are computed here from now on. Its number is not used again.
pyorch_status pyorch_disconnect(pyorch_engine * engine, int32_t peer);

typedef struct pyorch_peer_info {
    int32_t  joined;       // nonzero: joined now
    int32_t  same_kernels; // nonzero: results are equal bit for bit
    uint64_t requests;
    uint64_t failed; // requests that were computed here after all
    uint64_t slots;  // rows times experts sent to it
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t times_lost;
    char     error[256]; // the last reason of a loss or failure, "" if there was none
} pyorch_peer_info;

// Returns facts and counts of a server.
pyorch_status pyorch_get_peer(pyorch_engine * engine, int32_t peer, pyorch_peer_info * info);

// Sets the servers that can compute each expert of the layer. peers[n_expert][n_places]: numbers of pyorch_connect; -1
// ends a list; an expert with an empty list is computed here. pyorch_choose_replicas chooses among available servers.
// An expert that is resident here is computed here. May be called at any time; a running ubatch keeps its placement. If
// other servers cannot compute a layer's graph, as with an adapter, the layer is computed here.
pyorch_status pyorch_set_placement(
    pyorch_engine * engine, int32_t il, const int32_t * peers, int32_t n_expert, int32_t n_places);

// Times of a server's recent answers: sums that fade.
typedef struct pyorch_pace {
    double answers;
    double slots; // rows times experts
    double slots_squared;
    double seconds; // from the request to the answer
    double slots_seconds;
    double pending; // slots without an answer yet; not a sum
} pyorch_pace;

// Chooses servers as the engine does, for simulations. places[n][n_places]: the servers, among paces[n_peers], that
// have each of n experts; -1 ends a list. slots[n]: slots of each expert. chosen[n]: the server with the earliest
// expected answer, the first one of equals; -1 for an expert without a server.
pyorch_status pyorch_choose_replicas(int32_t n, int32_t n_places, const int32_t * places, const int32_t * slots,
    int32_t n_peers, const pyorch_pace * paces, int32_t * chosen);

typedef struct pyorch_remote_counts {
    uint64_t slots;    // slots sent to other servers
    uint64_t fallback; // slots without an answer, which were computed here
    uint64_t wait_ns;  // time that layers waited for answers after their own experts were computed
    uint64_t read;     // slots not sent, because reading their experts should be faster
} pyorch_remote_counts;

// Returns counts of remote execution.
pyorch_status pyorch_get_remote_counts(pyorch_engine * engine, pyorch_remote_counts * counts);

// allowed, nonzero: reads another server's expert from the own disk if recent answers and reads suggest that this is
// faster. Default: only if no server that has the expert is available.
pyorch_status pyorch_allow_reads(pyorch_engine * engine, int32_t allowed);

// For a model with a share of the experts: computes the first ubatch, if it comes before any placement, with available
// experts in place of missing ones. So llama-server's trial of its context works before other servers are connected.
pyorch_status pyorch_expect_trial(pyorch_engine * engine);

#ifdef __cplusplus
}
#endif

#endif
