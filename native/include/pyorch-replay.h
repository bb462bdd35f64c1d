// Replay: the table, a policy and a predictor with a recorded routing, in simulated time. And an engine that computes
// with a given or simulated set of resident experts, for evaluations.
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

// Makes an engine for pyorch_replay, as pyorch_engine_new does. It reads nothing, and no model can be loaded under it.
// It also has the policies and predictors that know the future or exist for comparison.
pyorch_status pyorch_simulation_new(
    const pyorch_model_map * map, const pyorch_config * config, pyorch_engine ** engine);

// Sets the router of a layer, for such an engine, which has no graph. Copied.
pyorch_status pyorch_set_router(pyorch_engine * engine, int32_t il, const pyorch_router * router);

// A recorded routing. Arrays are row-major by recorded token. L layers: the first n_layers of the engine's map, the
// executed ones.
typedef struct pyorch_recording {
    int64_t          n_tokens;
    int32_t          n_layers;
    int32_t          n_expert;
    int32_t          n_used;
    int32_t          n_embd;
    const uint16_t * experts;    // [n_tokens][L][n_used], the likeliest first
    const float *    weights;    // [n_tokens][L][n_used]
    const float *    probs;      // [n_tokens][L][n_expert] with the sum 1, or NULL
    const float *    states;     // [n_tokens][L][n_embd] the routers' inputs before their normalization, or NULL
    const float *    embeddings; // [n_tokens][n_embd] of the embedding layer, or NULL
    const uint32_t * request;    // [n_tokens]
    const int16_t *  forecasts;  // [n_tokens][L][n_distances][n_forecast] the oracle's experts for a layer of a token,
                                 // so many layers (less one) ahead, the likeliest first, -1 after the last
    int32_t n_distances;
    int32_t n_forecast;

    // The order of the replay: ubatch u has the tokens order[begin[u]] to order[begin[u + 1] - 1].
    int64_t         n_ubatches;
    const int64_t * begin; // [n_ubatches + 1]
    const int64_t * order;
    const uint8_t * decode; // [n_ubatches] nonzero: one token of each sequence
} pyorch_recording;

typedef struct pyorch_replay_config {
    double  read_bytes_per_second;
    double  read_seconds;    // additional time of a read request
    double  compute_seconds; // of a decoded token with all experts resident, spread evenly over the layers
    double  route_share;     // share of a layer's computing before its router
    double  prefill_seconds; // of a token of a prompt
    double  predict_seconds; // from a layer's router to its forecast
    int64_t n_warm;          // ubatches before counting starts
    double  pause_seconds;   // the disk stops for so long at the end of each period; 0: never
    double  period_seconds;
    double  decode_bytes_per_second; // of one thread that decodes compressed experts, in decoded form; 0: no time
    int64_t n_decoders;              // such threads; default 1

    // A device with slots above host memory. It computes everything before a router, and its own experts, while the
    // processor computes the others.
    uint64_t device_bytes;          // of its memory, 0: no device
    double   link_bytes_per_second; // of uploads; 0: they take no time
    int64_t  device_policy;         // pyorch_policy; default PYORCH_LEARNED
    uint64_t device_misses;         // pyorch_device_misses
    double   device_speed;          // of its computing, relative to the processor; default 1
    double   device_prefill_speed;  // the same for a prompt
    uint64_t device_ahead;          // see pyorch_config
} pyorch_replay_config;

extern const pyorch_replay_config pyorch_default_replay_config; // a disk of 1 GB/s, a processor that takes no time

// The result of the counted ubatches. Hits, loads and bytes are in pyorch_get_stats.
typedef struct pyorch_replay_result {
    int64_t n_tokens;
    int64_t n_decoded;
    double  seconds;
    double  decode_seconds;
    double  stall_seconds;                               // the part without a matrix to compute with
    double  read_seconds;                                // time in which the disk was busy
    double  predict_wall_seconds;                        // real time of forecasts on this machine
    double  decode_work_seconds;                         // sum over threads that decode compressed experts
    int64_t device_hits, device_misses, device_computed; // see pyorch_stats
    int64_t device_loads, device_evictions, device_bytes;
    int64_t device_ahead, device_ahead_hits, device_ahead_late;
} pyorch_replay_result;

// Plays a recording on a simulated engine, which keeps its resident experts afterwards.
// right, total: [L][max_distance][n_ranks] or NULL: how often the expert of a forecast at a rank, so many layers (less
// one) ahead, was used, and how often a forecast had that rank. For decoded tokens.
// ends: [n_ubatches] or NULL: the end of each ubatch, in seconds since the first one began.
pyorch_status pyorch_replay(pyorch_engine * engine, const pyorch_recording * recording,
    const pyorch_replay_config * config, pyorch_replay_result * result, int32_t max_distance, int32_t n_ranks,
    uint64_t * right, uint64_t * total, double * ends);

//
// simulated residency, for an engine that computes
//

// Lets substitution treat exactly the experts of mask[n_expert] as resident; NULL: the resident ones.
pyorch_status pyorch_set_cache(pyorch_engine * engine, int32_t il, const uint8_t * mask, int32_t n);

// Lets substitution treat as resident the content of a simulated cache with the budget and the policy of the engine. A
// read of an expert takes read_layers times the computing of a layer of a token, so results do not depend on the speed
// of this machine. The cache starts empty, without guesses, and fills as layers are computed. seed 0: reads take the
// time of their bytes; otherwise a random time from half to one and a half of it. REQUIRES: no decode is running.
pyorch_status pyorch_simulate_cache(pyorch_engine * engine, double read_layers, uint64_t seed);

// Puts experts into the simulated cache at once, within its budget.
pyorch_status pyorch_fill_simulated_cache(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// Returns the stats of the simulated cache; pyorch_reset_stats zeroes them too. PYORCH_INVALID if there is none.
pyorch_status pyorch_get_simulated_stats(pyorch_engine * engine, int32_t il, pyorch_stats * stats);

#ifdef __cplusplus
}
#endif

#endif
