// Replay: what the table, a policy and a predictor would do with a recorded routing, in simulated time; and what an
// engine would do with what it is told is in memory, to evaluate it.
//
// The rules of pyorch.h hold.

#ifndef PYORCH_REPLAY_H
#define PYORCH_REPLAY_H

#include "pyorch.h"

#ifdef __cplusplus
extern "C" {
#endif

//
// replay
//

// An engine for pyorch_replay, as pyorch_engine_new makes them: nothing is read, and no model can be loaded under it.
// It has the policies and predictors, too, that know the future or exist to be compared with.
pyorch_status pyorch_simulation_new(
    const pyorch_model_map * map, const pyorch_config * config, pyorch_engine ** engine);

// Copied. For such an engine, which has no graph.
pyorch_status pyorch_set_router(pyorch_engine * engine, int32_t il, const pyorch_router * router);

// Arrays are row-major by recorded token; L layers, the first n_layers of the engine's map: no token passes others.
typedef struct pyorch_recording {
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
    const int16_t *  forecasts; // [n_tokens][L][n_distances][n_forecast] experts that the oracle names for a layer of a
                                // token, so many layers (less one) ahead, the likeliest first, -1 behind the last
    int32_t n_distances;
    int32_t n_forecast;

    // What is played, in this order: ubatch u has the tokens order[begin[u]] to order[begin[u + 1] - 1].
    int64_t         n_ubatches;
    const int64_t * begin; // [n_ubatches + 1]
    const int64_t * order;
    const uint8_t * decode; // [n_ubatches] nonzero: one token of each sequence
} pyorch_recording;

typedef struct pyorch_replay_config {
    double  read_bytes_per_second;
    double  read_seconds;    // that a request costs beside its bytes
    double  compute_seconds; // of a decoded token when all is resident, spread evenly over the layers
    double  route_share;     // of a layer's, what is computed before its router
    double  prefill_seconds; // of a token of a prompt
    double  predict_seconds; // from a layer's router to the forecast that follows from it
    int64_t n_warm;          // ubatches that are played before anything is counted
    double  pause_seconds;   // at the end of each period the disk stands still for so long; 0: never
    double  period_seconds;
    double  decode_bytes_per_second; // of one thread, of compressed experts as kernels compute with them; 0: no time
    int64_t n_decoders;              // such threads; default 1

    // Slots of a device in front of host memory; what comes before a router is computed there, and the experts that it
    // has, while the processor computes the others.
    uint64_t device_bytes;          // of its memory, 0: there is none
    double   link_bytes_per_second; // to it; 0: uploads take no time
    int64_t  device_policy;         // pyorch_policy; default PYORCH_LEARNED
    uint64_t device_misses;         // pyorch_device_misses
    double   device_speed;          // of its computing, in that of the processor; default 1
    double   device_prefill_speed;  // the same of a prompt
    uint64_t device_ahead;          // see pyorch_config
} pyorch_replay_config;

extern const pyorch_replay_config pyorch_default_replay_config; // a disk of 1 GB/s, a processor that takes no time

// Of what was counted. Hits, loads and bytes are in pyorch_get_stats.
typedef struct pyorch_replay_result {
    int64_t n_tokens;
    int64_t n_decoded;
    double  seconds;
    double  decode_seconds;
    double  stall_seconds;                               // of these, the time without a matrix to compute with
    double  read_seconds;                                // in which the disk was busy
    double  predict_wall_seconds;                        // that forecasts really took, on this machine
    double  decode_work_seconds;                         // of threads that decode compressed experts, their sum
    int64_t device_hits, device_misses, device_computed; // see pyorch_stats
    int64_t device_loads, device_evictions, device_bytes;
    int64_t device_ahead, device_ahead_hits, device_ahead_late;
} pyorch_replay_result;

// Plays a recording on a simulated engine, which keeps what it then has resident.
// right, total: [L][max_distance][n_ranks] or NULL: how often the expert that a forecast named at a rank, so many
// layers (less one) ahead, was used, and how often one was named. Of decoded tokens.
// ends: [n_ubatches] or NULL: when each ubatch ended, in seconds since the first one began.
pyorch_status pyorch_replay(pyorch_engine * engine, const pyorch_recording * recording,
    const pyorch_replay_config * config, pyorch_replay_result * result, int32_t max_distance, int32_t n_ranks,
    uint64_t * right, uint64_t * total, double * ends);

//
// what counts as resident: of an engine that computes
//

// Substitution takes exactly the experts of mask[n_expert] for resident, whatever is; NULL: those that are.
pyorch_status pyorch_set_cache(pyorch_engine * engine, int32_t il, const uint8_t * mask, int32_t n);

// From now on substitution takes for resident what would be in a cache with the budget and the policy of the engine, on
// a machine where an expert is read in so many times the time in which a layer of a token computes: so what is computed
// does not depend on how fast this machine reads or computes. The cache begins empty, nothing is guessed in it, and it
// fills as layers are computed. seed: 0: reads take their bytes' time; else from half to one and a half of it, as
// drawn. REQUIRES: nothing is being decoded.
pyorch_status pyorch_simulate_cache(pyorch_engine * engine, double read_layers, uint64_t seed);

// These come into the simulated cache at once, as far as its budget reaches.
pyorch_status pyorch_fill_simulated_cache(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// Of the simulated cache, as pyorch_get_stats; also zeroed by pyorch_reset_stats. PYORCH_INVALID where there is none.
pyorch_status pyorch_get_simulated_stats(pyorch_engine * engine, int32_t il, pyorch_stats * stats);

#ifdef __cplusplus
}
#endif

#endif
