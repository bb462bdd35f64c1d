// Several servers: experts that others compute.
//
// The rules of pyorch.h hold.

#ifndef PYORCH_CLUSTER_H
#define PYORCH_CLUSTER_H

#include "pyorch.h"

#ifdef __cplusplus
extern "C" {
#endif

// Servers that have the same model loaded compute experts for each other. One that listens answers all who know its
// token; one that is connected sends it the rows of those experts that it has a place for there, and goes on with its
// own meanwhile. The results are those of a single server, bit for bit where pyorch_peer_info.same_kernels says so.
// What is lost with a server is computed here, from the model's file, and the request goes on.
//
// Numbers travel as they are, and so does the token: between machines that is for a network that nobody else listens
// to, or for a process beside it that encrypts.

typedef struct pyorch_endpoint {
    const char * address;
    const char * token; // what others must know, 1 to 255 bytes
    const char * model; // fingerprint of the model, at most 127 bytes; others must have the same
    int32_t      port;  // where one listens, 0: a free one
} pyorch_endpoint;

// Answers other servers from now on. n_threads: that compute for them. port: where it listens. A layer is computed once
// a context of the model was made. Experts are held under the engine's budget; beside it, requests and answers take an
// eighth of that at most, or what four requests of 1024 rows times experts take with their answers, if that is more; and
// no more than four of 4096. What has no room waits. PYORCH_INVALID if it listens already.
pyorch_status pyorch_listen(pyorch_engine * engine, const pyorch_endpoint * at, int32_t n_threads, int32_t * port);

// Ends that, and all connections; nothing where it does not listen.
pyorch_status pyorch_stop_listening(pyorch_engine * engine);

typedef struct pyorch_served {
    uint64_t connections; // that joined
    uint64_t refused;     // that did not, or were cut off
    uint64_t requests;
    uint64_t failed; // of them
    uint64_t slots;  // rows times experts that were computed
    uint64_t compute_ns;
    char     error[256];   // why somebody was refused last, "" if nobody was
    uint64_t buffer_bytes; // of memory beside the engine's budget: to compute in, and for requests and answers
} pyorch_served;

// Since it listens. PYORCH_INVALID if it does not.
pyorch_status pyorch_get_served(pyorch_engine * engine, pyorch_served * served);

// What rows of numbers travel as, there and back. By BF16 they take half the bytes, and results are not the same.
typedef enum pyorch_rows {
    PYORCH_ROWS_F32  = 0,
    PYORCH_ROWS_BF16 = 1,
} pyorch_rows;

// Joins a server that listens, and whenever it is lost, again. timeout_ms: a server that is silent for so long is lost.
// rows: of pyorch_rows. peer: its number, from 0. PYORCH_IO with the reason where it cannot be joined now.
pyorch_status pyorch_connect(
    pyorch_engine * engine, const pyorch_endpoint * at, int32_t timeout_ms, int32_t rows, int32_t * peer);

// What it had a place for is computed here from now on. Its number is not used again.
pyorch_status pyorch_disconnect(pyorch_engine * engine, int32_t peer);

typedef struct pyorch_peer_info {
    int32_t  joined;       // nonzero: now
    int32_t  same_kernels; // nonzero: results are the same, bit for bit
    uint64_t requests;
    uint64_t failed; // of them, those that were computed here after all
    uint64_t slots;  // rows times experts that it was sent
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t times_lost;
    char     error[256]; // why it was lost or failed last, "" if never
} pyorch_peer_info;

pyorch_status pyorch_get_peer(pyorch_engine * engine, int32_t peer, pyorch_peer_info * info);

// peers[n_expert][n_places]: who can compute each expert of the layer: numbers of pyorch_connect; -1 ends a list, and
// where it is empty, this server does. Of several that are there, the one is asked that pyorch_choose_replicas names; an
// expert that is resident here is computed here. At any time; a ubatch under way keeps to what it began with. A layer
// whose graph does what other servers may not do, as with an adapter, is computed here all the same.
pyorch_status pyorch_set_placement(
    pyorch_engine * engine, int32_t il, const int32_t * peers, int32_t n_expert, int32_t n_places);

// How long answers of a server took lately: sums over them, all of which fade alike.
typedef struct pyorch_pace {
    double answers;
    double slots; // rows times experts
    double slots_squared;
    double seconds; // from the question to the answer
    double slots_seconds;
    double pending; // slots that were asked for and not answered yet: no sum
} pyorch_pace;

// As the engine does it, for simulations. places[n][n_places]: servers that have each of n experts, of paces[n_peers];
// -1 ends a list. slots[n]: of each expert. chosen[n]: the server that is expected to have answered first, of equals the
// first; -1 for an expert without any.
pyorch_status pyorch_choose_replicas(int32_t n, int32_t n_places, const int32_t * places, const int32_t * slots,
    int32_t n_peers, const pyorch_pace * paces, int32_t * chosen);

typedef struct pyorch_remote_counts {
    uint64_t slots;    // that were sent
    uint64_t fallback; // of them, those that no server answered: they were computed here
    uint64_t wait_ns;  // that layers waited for answers, when their own experts were done
    uint64_t read;     // that were not sent, because reading their experts was estimated to be faster
} pyorch_remote_counts;

pyorch_status pyorch_get_remote_counts(pyorch_engine * engine, pyorch_remote_counts * counts);

// allowed: nonzero: an expert that another server has is read from the own disk where that is estimated to be faster
// than to ask, by how long answers and reads took lately. Until set, it is read only when no server is there that has
// it.
pyorch_status pyorch_allow_reads(pyorch_engine * engine, int32_t allowed);

// Of a share of the experts: the first ubatch, if it comes before any placement, is computed with experts that are here in
// place of those that are not. So llama-server, which tries its context before others can be asked, finds that it works.
pyorch_status pyorch_expect_trial(pyorch_engine * engine);

#ifdef __cplusplus
}
#endif

#endif
