// Replay: what the table, a policy and a predictor would do with a recorded routing, in simulated time.
//
// The rules of pyorch.h hold: statuses, sizes of structs, declarations only below the guard.

#ifndef PYORCH_REPLAY_H
#define PYORCH_REPLAY_H

#include "pyorch.h"

#ifdef __cplusplus
extern "C" {
#endif

// Arrays are row-major by recorded token; L layers, the first n_layers of the engine's map: no token passes others.
typedef struct pyorch_recording {
    uint64_t         struct_size;
    int64_t          n_tokens;
    int32_t          n_layers;
    int32_t          n_expert;
    int32_t          n_used;
    int32_t          n_embd;
    const uint16_t * experts;    // [n_tokens][L][n_used], the likeliest first
    const float *    weights;    // [n_tokens][L][n_used]
    const float *    probs;      // [n_tokens][L][n_expert] with the sum 1, or NULL
    const float *    states;     // [n_tokens][L][n_embd] of which the routers' inputs are the normalization, or NULL
    const float *    embeddings; // [n_tokens][n_embd] of the embedding layer, or NULL
    const uint32_t * request;    // [n_tokens]

    // What is played, in this order: ubatch u has the tokens order[begin[u]] to order[begin[u + 1] - 1].
    int64_t         n_ubatches;
    const int64_t * begin; // [n_ubatches + 1]
    const int64_t * order;
    const uint8_t * decode; // [n_ubatches] nonzero: one token of each sequence
} pyorch_recording;

pyorch_status pyorch_recording_default(pyorch_recording * recording, uint64_t struct_size);

typedef struct pyorch_replay_config {
    uint64_t struct_size;
    double   read_bytes_per_second;
    double   read_seconds;    // that a request costs beside its bytes
    double   compute_seconds; // of a decoded token when all is resident, spread evenly over the layers
    double   route_share;     // of a layer's, what is computed before its router
    double   prefill_seconds; // of a token of a prompt
    double   predict_seconds; // from a layer's router to the forecast that follows from it
    int64_t  n_warm;          // ubatches that are played before anything is counted
    double   pause_seconds;   // at the end of each period the disk stands still for so long; 0: never
    double   period_seconds;
    double   decode_bytes_per_second; // of one thread, of compressed experts as kernels compute with them; 0: no time
    int64_t  n_decoders;              // such threads; default 1

    // Slots of a device in front of host memory; what comes before a router is computed there, and the experts that it
    // has, while the processor computes the others.
    uint64_t device_bytes;          // of its memory, 0: there is none
    double   link_bytes_per_second; // to it; 0: uploads take no time
    int64_t  device_policy;         // pyorch_policy; default PYORCH_LEARNED
    uint64_t device_misses;         // pyorch_device_misses
    double   device_rates[5];       // see pyorch_config
    double   device_speed;          // of its computing, in that of the processor; default 1
    double   device_prefill_speed;  // the same of a prompt
    uint64_t device_ahead;          // see pyorch_config
} pyorch_replay_config;

pyorch_status pyorch_replay_config_default(pyorch_replay_config * config, uint64_t struct_size);

// Of what was counted. Hits, loads and bytes are in pyorch_get_stats.
typedef struct pyorch_replay_result {
    uint64_t struct_size;
    int64_t  n_tokens;
    int64_t  n_decoded;
    double   seconds;
    double   decode_seconds;
    double   stall_seconds;                               // of these, the time without a matrix to compute with
    double   read_seconds;                                // in which the disk was busy
    double   predict_wall_seconds;                        // that forecasts really took, on this machine
    double   decode_work_seconds;                         // of threads that decode compressed experts, their sum
    int64_t  device_hits, device_misses, device_computed; // see pyorch_stats
    int64_t  device_loads, device_evictions, device_bytes;
    int64_t  device_ahead, device_ahead_hits, device_ahead_late;
} pyorch_replay_result;

// Plays a recording on a simulated engine, which keeps what it then has resident.
// right, total: [L][max_distance][n_ranks] or NULL: how often the expert that a forecast named at a rank, so many
// layers (less one) ahead, was used, and how often one was named. Of decoded tokens.
// ends: [n_ubatches] or NULL: when each ubatch ended, in seconds since the first one began.
pyorch_status pyorch_replay(pyorch_engine * engine, const pyorch_recording * recording,
    const pyorch_replay_config * config, pyorch_replay_result * result, int32_t max_distance, int32_t n_ranks,
    uint64_t * right, uint64_t * total, double * ends);

#ifdef __cplusplus
}
#endif

#endif
