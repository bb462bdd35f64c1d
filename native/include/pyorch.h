// pyorch: run Mixture-of-Experts models whose experts do not fit in memory.
//
// The C API of libpyorch. A model map says where each routed expert of a GGUF lies; an engine keeps
// a budgeted set of them resident while llama.cpp computes. Layers are named by llama.cpp's block
// number il, experts by their index in the layer.
//
// Every function that returns pyorch_status leaves a sentence in pyorch_last_error() when it does
// not return PYORCH_OK, and then has changed nothing. All functions may be called from any thread
// unless said otherwise. cffi parses this file: declarations only below the guard.

#ifndef PYORCH_H
#define PYORCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pyorch_status {
    PYORCH_OK      = 0,
    PYORCH_INVALID = 1, // an argument is out of range
    PYORCH_FORMAT  = 2, // a file is not what it should be
    PYORCH_IO      = 3, // the operating system refused
    PYORCH_BUDGET  = 4, // the budget is too small for what was asked
} pyorch_status;

// The sentence for the last failure on this thread. Valid until the thread's next call.
const char * pyorch_last_error(void);

//
// model map
//

typedef struct pyorch_map pyorch_map;

enum { PYORCH_MAX_ROLES = 3 }; // matrices of one expert: up, gate, down or gate_up, down

typedef struct pyorch_map_info {
    char     arch[64];       // general.architecture
    char     name[128];      // general.name, may be empty
    int32_t  n_files;        // 1, or the number of shards
    int32_t  n_layers;       // blocks of the model
    int32_t  n_moe_layers;   // blocks with routed experts
    int32_t  n_expert_used;  // top-k
    uint64_t file_bytes;     // all shards
    uint64_t expert_bytes;   // routed experts, as they lie in the file
    uint64_t dense_bytes;    // all other tensors
    uint64_t slots_bytes;    // what the experts occupy when all are resident (alignment included)
    uint64_t floor_bytes;    // smallest budget: all experts of the largest layer
} pyorch_map_info;

typedef struct pyorch_layer_info {
    int32_t  il;
    int32_t  n_expert;
    int32_t  n_roles;
    char     role[PYORCH_MAX_ROLES][16];  // in the order in which the kernels need them
    char     type[PYORCH_MAX_ROLES][16];  // ggml type
    uint64_t expert_bytes;                // one expert, as it lies in the file
    uint64_t slot_bytes;                  // one expert, resident
} pyorch_layer_info;

// Reads the metadata of a GGUF, shards included. A model without routed experts has n_moe_layers 0.
pyorch_status pyorch_map_open(const char * path, pyorch_map ** map);
void          pyorch_map_free(pyorch_map * map);

pyorch_status pyorch_map_get_info(const pyorch_map * map, pyorch_map_info * info);

// index: 0 .. n_moe_layers-1, in the order of il
pyorch_status pyorch_map_get_layer(const pyorch_map * map, int32_t index, pyorch_layer_info * info);

// Where a matrix of an expert lies: path (owned by the map), offset and size in bytes.
pyorch_status pyorch_map_get_range(const pyorch_map * map, int32_t il, int32_t expert, int32_t role,
                                   const char ** path, uint64_t * offset, uint64_t * size);

// An integer of the metadata. Of an array: the element at index. PYORCH_INVALID where there is none.
pyorch_status pyorch_map_get_int(const pyorch_map * map, const char * key, int32_t index, int64_t * value);

// Where any tensor lies: path (owned by the map), offset and size in bytes.
pyorch_status pyorch_map_get_tensor(const pyorch_map * map, const char * name,
                                    const char ** path, uint64_t * offset, uint64_t * size);

// A string of the metadata, owned by the map.
pyorch_status pyorch_map_get_str(const pyorch_map * map, const char * key, const char ** value);

//
// engine
//

typedef struct pyorch_engine pyorch_engine;

typedef enum pyorch_policy {
    PYORCH_LRU = 0, // least recently used goes first
    PYORCH_LFU = 1, // least frequently used goes first, old uses fade
} pyorch_policy;

// Bytes of shard file (0-based) from offset into buf. Returns the number of bytes read, which may be
// short only at the end of the file, or a negative errno. Called by several threads at once.
typedef int64_t (*pyorch_read_fn)(void * user, int32_t file, uint64_t offset, void * buf, uint64_t size);

typedef struct pyorch_config {
    uint64_t       budget_bytes; // for all expert memory; above slots_bytes means all
    int32_t        policy;       // pyorch_policy
    int32_t        n_readers;    // reader threads, 0: default
    int32_t        direct_io;    // nonzero: O_DIRECT where the file system has it and experts are large enough
    uint64_t       read_bytes;   // one read request at most, 0: default
    pyorch_read_fn read;         // NULL: the files of the map
    void *         read_user;
} pyorch_config;

// Starts the reader threads. The map is copied. PYORCH_BUDGET below floor_bytes.
pyorch_status pyorch_engine_new(const pyorch_map * map, const pyorch_config * config, pyorch_engine ** engine);

// REQUIRES: the models loaded under this engine, and their contexts, are freed.
void          pyorch_engine_free(pyorch_engine * engine);

// Models that the calling thread loads from now on, from the files of the engine's map, leave their
// experts to the engine. NULL ends that. A load of other files is untouched.
pyorch_status pyorch_engine_capture(pyorch_engine * engine);

// As capture, but the experts stay mapped from the file and nothing manages them: the same kernels
// as under an engine, without one. For comparisons.
pyorch_status pyorch_capture_mapped(const pyorch_map * map);

// The message of the last decode that the engine failed, "" if none. Copies at most size bytes.
pyorch_status pyorch_engine_error(pyorch_engine * engine, char * buf, size_t size);

pyorch_status pyorch_set_budget(pyorch_engine * engine, uint64_t budget_bytes);
pyorch_status pyorch_set_policy(pyorch_engine * engine, int32_t policy);

// Experts of a layer that eviction leaves (min), and that it may hold (max); a running layer may
// exceed max for as long as it runs. Default 0 and n_expert.
pyorch_status pyorch_set_layer_limits(pyorch_engine * engine, int32_t il, int32_t min, int32_t max);

enum {
    PYORCH_RESIDENT = 1, // all matrices are there
    PYORCH_LOADING  = 2,
    PYORCH_PINNED   = 4, // by pyorch_pin
    PYORCH_IN_USE   = 8, // by a running layer
};

// mask[n]: flags of each expert of the layer; n is n_expert.
pyorch_status pyorch_get_residency(pyorch_engine * engine, int32_t il, uint8_t * mask, int32_t n);

// Queue reads behind all demand, in the given order; resident experts are skipped. Returns at once.
pyorch_status pyorch_prefetch(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// What guesses the experts of later layers while a layer of a decoding ubatch computes.
typedef enum pyorch_predictor {
    PYORCH_PREDICT_NONE           = 0,
    PYORCH_PREDICT_PREVIOUS_TOKEN = 1, // what the layer used for the previous token
    PYORCH_PREDICT_LAYER_ALL      = 2, // every expert of the layer
    PYORCH_PREDICT_NEXT_ROUTER    = 3, // its router, applied to the router input of the layer at hand
    PYORCH_PREDICT_QUASI_HIDDEN   = 4, // its router, applied to a guess of its input: see pyorch_set_default_vectors
} pyorch_predictor;

// distance: layers ahead at most, at least 1. min_precision: guesses that come true less often than this, as counted
// while running, are not read; 0 reads all. automatic: nonzero: only while it makes decoding faster, which is tried.
pyorch_status pyorch_set_prefetch(pyorch_engine * engine, int32_t predictor, int32_t distance, double min_precision,
                                  int32_t automatic);

// Mean outputs of the experts of a layer, [n_expert][n_embd], for quasi-hidden states (Speculating Experts, section 3).
pyorch_status pyorch_set_default_vectors(pyorch_engine * engine, int32_t il, const float * vectors, int32_t n_expert, int32_t n_embd);

// While on, the outputs of all experts are summed up, for pyorch_get_mean_outputs. Turning it on begins anew.
pyorch_status pyorch_set_calibration(pyorch_engine * engine, int32_t on);

// vectors [n_expert][n_embd]: mean output of each expert since calibration began, 0 where it was never used;
// counts [n_expert]: how often it was.
pyorch_status pyorch_get_mean_outputs(pyorch_engine * engine, int32_t il, float * vectors, uint64_t * counts, int32_t n_expert, int32_t n_embd);

// What was predicted when layer il_from was routed: experts of layer il, the likeliest first, each once.
// Called on the prefetching thread.
typedef void (*pyorch_prediction_fn)(void * user, const void * context, int32_t il_from, int32_t il, const int32_t * experts, int32_t n);

// One per engine; NULL removes it. On return no call of the old one is running.
pyorch_status pyorch_set_prediction_observer(pyorch_engine * engine, pyorch_prediction_fn observer, void * user);

// Bring in and never evict, until unpinned. PYORCH_BUDGET when the rest would fall below the floor.
pyorch_status pyorch_pin  (pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);
pyorch_status pyorch_unpin(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// Free the memory of resident experts that are neither pinned nor in use.
pyorch_status pyorch_evict(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// Wait until no read is queued or running.
pyorch_status pyorch_wait_idle(pyorch_engine * engine);

typedef struct pyorch_stats {
    uint64_t hits;            // (layer, expert) uses that found the expert resident
    uint64_t misses;          // uses that had to wait for a read, or for the rest of one
    uint64_t loads;           // experts read
    uint64_t prefetch_loads;  // of them, read ahead
    uint64_t prefetch_hits;   // experts read ahead and then used
    uint64_t prefetch_late;   // of them, those that had not wholly arrived
    uint64_t prefetch_wasted; // experts read ahead on a prediction that did not come true
    uint64_t evictions;
    uint64_t bytes_read;
    uint64_t read_ns;         // sum over readers of the time spent in reads
    uint64_t stall_ns;        // time in which at least one compute thread slept for an expert
    uint64_t failures;        // decodes failed
    uint64_t layer_passes;    // layers computed (per ubatch)
    uint64_t tokens;          // tokens routed, summed over layers
    uint64_t resident_experts;
    uint64_t resident_bytes;
    uint64_t used_bytes;      // all expert memory now
    uint64_t peak_bytes;      // the most it ever was
    uint64_t budget_bytes;
} pyorch_stats;

// il -1: the whole engine. Of one layer: counters of uses, loads, evictions and residency only.
pyorch_status pyorch_get_stats(pyorch_engine * engine, int32_t il, pyorch_stats * stats);

// Zero the counters (not the gauges).
pyorch_status pyorch_reset_stats(pyorch_engine * engine);

// What a layer's router decided for one ubatch. Arrays are valid during the call, row-major by token.
typedef struct pyorch_routing {
    const void *    context;       // tells contexts apart
    int32_t         il;
    int32_t         decode;        // nonzero: one token of each sequence
    int32_t         n_tokens;
    int32_t         n_expert;
    int32_t         n_expert_used;
    int32_t         n_embd;
    const int32_t * experts;       // [n_tokens][n_expert_used]
    const float *   weights;       // [n_tokens][n_expert_used] as multiplied with the outputs
    const float *   probs;         // [n_tokens][n_expert] after gating
    const float *   logits;        // [n_tokens][n_expert] of the router
    const float *   inputs;        // [n_tokens][n_embd] of the router
    const float *   residuals;     // [n_tokens][n_embd] of which the inputs are the RMS normalization, or NULL
} pyorch_routing;

// Called on a compute thread, between router and experts: it must return quickly and not decode.
typedef void (*pyorch_observer_fn)(void * user, const pyorch_routing * routing);

// One observer per engine; NULL removes it. On return no call of the old one is running.
pyorch_status pyorch_set_observer(pyorch_engine * engine, pyorch_observer_fn observer, void * user);

//
// substitution: lossy, off until set
//

typedef enum pyorch_substitute_mode {
    PYORCH_SUBSTITUTE_NONE    = 0,
    PYORCH_SUBSTITUTE_BUDDIES = 1, // from the lists of pyorch_set_buddies
    PYORCH_SUBSTITUTE_RANDOM  = 2, // any resident expert: the baseline
} pyorch_substitute_mode;

typedef enum pyorch_substitute_weight {
    PYORCH_WEIGHT_KEEP   = 0, // the substitute gets the weight of the expert that it replaces
    PYORCH_WEIGHT_OWN    = 1, // its own, normalized as the model does
    PYORCH_WEIGHT_FITTED = 2, // that of the replaced one, times the scale of the buddy list
} pyorch_substitute_weight;

typedef enum pyorch_substitute_order {
    PYORCH_ORDER_RANK   = 0, // as the router ranks them
    PYORCH_ORDER_WEIGHT = 1, // lowest weight first
} pyorch_substitute_order;

typedef enum pyorch_on_miss {
    PYORCH_MISS_FETCH = 0, // wait for what no substitute covers
    PYORCH_MISS_DROP  = 1, // leave it out
} pyorch_on_miss;

// How a layer treats absent experts, by BuddyMoE's gates in their order. Each can be off.
typedef struct pyorch_substitution {
    int32_t  mode;          // pyorch_substitute_mode
    int32_t  prefill;       // nonzero: also in ubatches with several tokens of a sequence
    int32_t  search_rank;   // only the first so many of a buddy list, 0: all
    int32_t  max_per_token; // substitutions of a token in this layer, 0: no limit
    int32_t  weight;        // pyorch_substitute_weight
    int32_t  order;         // pyorch_substitute_order: in which the absent experts of a token are treated
    int32_t  on_miss;       // pyorch_on_miss, for what the gates allow but no buddy covers
    double   tau;           // none where the token activating entropy is at most this (below 0: off)
    double   temperature;   // of the probabilities in it, 1: as they are
    double   gamma;         // none where the two largest probabilities differ by at least this (above 1: off)
    double   beta;          // none where at least this share of the requested experts is absent (above 1: off)
    double   read_ms;       // above 0: beta adapts, so that a token reads no longer than this
    double   eta;           // of the router's logit in the priority
    double   kappa;         // of the hops in the priority
    double   reuse;         // factor for each time that a buddy was chosen in the ubatch, 1: none
    uint64_t seed;          // of random substitution
} pyorch_substitution;

pyorch_status pyorch_set_substitution(pyorch_engine * engine, int32_t il, const pyorch_substitution * substitution);

// ids, q, scale: [n_expert][k_max], best first; ids -1 after the last; scale may be NULL, or nan where it is not
// known. hops: [n_expert] to where an expert is, may be NULL. PYORCH_INVALID for ids that do not exist.
pyorch_status pyorch_set_buddies(pyorch_engine * engine, int32_t il, int32_t n_expert, int32_t k_max, const int32_t * ids,
                                 const float * q, const float * scale, const uint8_t * hops);

// Substitution takes exactly the experts of mask[n_expert] for resident, whatever is; NULL: those that are.
pyorch_status pyorch_set_cache(pyorch_engine * engine, int32_t il, const uint8_t * mask, int32_t n);

// Counters of ubatches that substitution may touch. A slot is one of the n_expert_used of a token.
typedef struct pyorch_substitution_counts {
    uint64_t tokens;
    uint64_t lossy_tokens;         // of them, those that got another expert or lost one
    uint64_t substituted;          // slots
    uint64_t dropped;              // slots
    uint64_t refused_tae;          // absent slots, by the first gate that refused
    uint64_t refused_margin;
    uint64_t refused_distribution;
    uint64_t refused_rho;          // max_per_token was reached
    uint64_t refused_buddies;      // no buddy was resident and free
    uint64_t rank_sum;             // of the buddies used, in their lists
    uint64_t absent;               // experts that the ubatches asked for and that were absent
    uint64_t avoided;              // of them, those that nobody asked for any more
} pyorch_substitution_counts;

// il -1: all layers. Zeroed by pyorch_reset_stats.
pyorch_status pyorch_get_substitution_counts(pyorch_engine * engine, int32_t il, pyorch_substitution_counts * counts);

// What substitution would make of a routing; counts and changes nothing but experts and weights.
// routing: its context and decode are not looked at; resident: [n_expert]; normalized, softmax_selected: how the
// model makes weights of probs (see RoutedBatch).
pyorch_status pyorch_substitute(pyorch_engine * engine, const pyorch_routing * routing, const uint8_t * resident,
                                int32_t normalized, int32_t softmax_selected, int32_t * experts, float * weights,
                                pyorch_substitution_counts * counts);

#ifdef __cplusplus
}
#endif

#endif
