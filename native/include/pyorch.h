// pyorch: run Mixture-of-Experts models that are larger than memory.
//
// The C API of libpyorch. A model map stores where each routed expert of a GGUF is. An engine keeps some experts
// resident, within a budget, while llama.cpp computes. Layers are named by llama.cpp's block number il, experts by
// their index in the layer.
//
// This header has what every program needs: models, budgets, prefetching, lossy settings, statistics. pyorch-devices.h
// has devices above host memory, pyorch-cluster.h servers that compute for each other, and pyorch-replay.h recorded
// routings in simulated time.
//
// A function that returns pyorch_status changes nothing if it does not return PYORCH_OK, and leaves a sentence in
// pyorch_last_error(). Any thread may call any function unless its comment says otherwise. cffi parses this file: only
// declarations below the guard.
//
// PYORCH_ABI numbers the functions and structs. A struct of settings starts as zeros, or as its pyorch_default_*.
//
// The engine waits for callbacks (pyorch_read_fn, pyorch_observer_fn). Inside one, a thread may call pyorch_get_*,
// pyorch_engine_error, pyorch_decode_error, all functions of the library, the model map and the history, and
// pyorch_prefetch, pyorch_pin, pyorch_unpin and pyorch_evict. Every other function of any engine returns
// PYORCH_CALLBACK there, because it could wait for the callback itself. A decode with managed experts fails there. A
// callback must not wait for a thread that makes such a call.

#ifndef PYORCH_H
#define PYORCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

//
// library
//

typedef enum pyorch_status {
    PYORCH_OK       = 0,
    PYORCH_INVALID  = 1, // an argument is out of range
    PYORCH_FORMAT   = 2, // a file is damaged or of the wrong kind
    PYORCH_IO       = 3, // the operating system refused
    PYORCH_BUDGET   = 4, // the budget is too small for the request
    PYORCH_MEMORY   = 5, // the system has no memory for the request
    PYORCH_CALLBACK = 6, // the function must not be called inside a callback
} pyorch_status;

// Returns the sentence for the last failure on this thread. It is valid until the thread's next call.
const char * pyorch_last_error(void);

// The number of the functions and structs that a program was compiled with. A library with another number does not fit.
enum { PYORCH_ABI = 8 };

int32_t      pyorch_abi(void);     // the PYORCH_ABI of the library
const char * pyorch_version(void); // "1.2.3"

// Choices by name. The values of a choice are those of its enum.
typedef enum pyorch_choices {
    PYORCH_CHOICES_POLICY           = 0, // pyorch_policy
    PYORCH_CHOICES_PREDICTOR        = 1, // pyorch_predictor
    PYORCH_CHOICES_SPECULATE        = 2, // pyorch_speculate
    PYORCH_CHOICES_SUBSTITUTE_MODE  = 3, // pyorch_substitute_mode
    PYORCH_CHOICES_SUBSTITUTE_ORDER = 4, // pyorch_substitute_order
    PYORCH_CHOICES_ON_MISS          = 5, // pyorch_on_miss
    PYORCH_CHOICES_GATING           = 6, // pyorch_gating
} pyorch_choices;

// Requirements of a choice.
enum {
    PYORCH_NEEDS_ROUTERS         = 1,    // the weights of the routers: the graph's, or pyorch_set_router
    PYORCH_NEEDS_STATES          = 2,    // what the routers see: their inputs, or the residuals before
    PYORCH_NEEDS_DISTRIBUTIONS   = 4,    // the probabilities of all experts
    PYORCH_NEEDS_EMBEDDINGS      = 8,    // of the tokens
    PYORCH_NEEDS_DEFAULT_VECTORS = 16,   // pyorch_set_default_vectors
    PYORCH_NEEDS_ESTIMATOR       = 32,   // pyorch_set_estimator
    PYORCH_NEEDS_HISTORY         = 64,   // pyorch_set_history
    PYORCH_NEEDS_FORECASTS       = 128,  // a predictor
    PYORCH_NEEDS_BUDDIES         = 256,  // pyorch_set_buddies
    PYORCH_NEEDS_FUTURE          = 512,  // what comes: only a replay knows
    PYORCH_NEEDS_GHOSTS          = 1024, // pyorch_set_ghosts
    PYORCH_NEEDS_REPLAY          = 2048, // a replay: the choice exists for comparison
};

typedef struct pyorch_choice {
    int32_t      value;       // of the enum
    uint32_t     needs;       // flags PYORCH_NEEDS_*: without any of them it does nothing
    uint32_t     uses;        // flags of optional data that make it better
    int32_t      executable;  // nonzero: a predictor whose forecasts layers can compute, see pyorch_set_speculation
    const char * name;        // such as "lru"; users type it
    const char * description; // one line
} pyorch_choice;

// Returns a choice by index, from 0; NULL after the last.
const pyorch_choice * pyorch_get_choice(int32_t choices, int32_t index);

//
// llama.cpp's fatal errors
//

// Sends the sentences of fatal errors, which end the process, to the stderr of the first call, even while the process
// redirects its stderr, as llama-cpp-python does when it loads a model.
void pyorch_show_fatal_errors(void);

// Prints a line "pyorch: ..." to that stderr.
void pyorch_notice(const char * line);

// Computes only on these processors, if the calling thread may use them, and reads experts on the others. Without
// processors, the system places threads. Applies to the whole process from the next decode on. Linux only.
pyorch_status pyorch_set_compute_cpus(const int32_t * cpus, int32_t n_cpus);

// Turns fatal errors of the calling thread into exceptions, from a call with on until as many calls with 0. llama.cpp
// turns these into a failure when it loads or quantizes a model or makes a context, with the sentence in its log;
// llama-server turns them into the answer of a request. REQUIRES: no other function of llama.cpp is called in between.
void pyorch_refuse_fatal_errors(int32_t on);

//
// grammars
//

// While this library is loaded, llama.cpp spends some seconds at most on reading, applying and advancing a grammar, and
// then throws. These two functions wrap llama.cpp's for a program that cannot catch exceptions.

// llama_sampler_init_grammar(), or if lazy llama_sampler_init_grammar_lazy_patterns(). vocab: a llama_vocab *. sampler:
// receives a llama_sampler *.
pyorch_status pyorch_init_grammar(const void * vocab, const char * grammar, const char * root, int32_t lazy,
    const char ** patterns, uint64_t n_patterns, const int32_t * tokens, uint64_t n_tokens, void ** sampler);

// llama_sampler_sample()
pyorch_status pyorch_sample(void * sampler, void * context, int32_t index, int32_t * token);

//
// model map
//

typedef struct pyorch_model_map pyorch_model_map;

enum { PYORCH_MAX_ROLES = 3 }; // matrices of one expert: up, gate, down or gate_up, down

typedef struct pyorch_model_map_info {
    char     arch[64];      // general.architecture
    char     name[128];     // general.name, may be empty
    int32_t  n_files;       // 1, or the number of shards
    int32_t  n_layers;      // blocks of the model
    int32_t  n_moe_layers;  // blocks with routed experts
    int32_t  n_expert_used; // top-k of the router; if layers differ, the largest
    uint64_t file_bytes;    // all shards
    uint64_t expert_bytes;  // routed experts in the file
    uint64_t dense_bytes;   // all other tensors
    uint64_t slots_bytes;   // memory of all experts when resident (alignment included)
    uint64_t floor_bytes;   // smallest budget: twice the experts of a token and one, of the largest layer
    uint64_t slim;          // nonzero: the file lacks the bytes of the experts; only a pack has them
    uint64_t n_params;      // numbers in all tensors
} pyorch_model_map_info;

typedef struct pyorch_layer_info {
    int32_t  il;
    int32_t  n_expert;
    int32_t  n_expert_used; // top-k of its router; 0: the file does not say
    int32_t  n_roles;
    char     role[PYORCH_MAX_ROLES][16];   // in the order in which kernels need them
    char     type[PYORCH_MAX_ROLES][16];   // ggml type
    int64_t  n_in[PYORCH_MAX_ROLES];       // numbers in a row
    uint64_t expert_bytes;                 // one expert in the file
    uint64_t slot_bytes;                   // one expert, resident
    char     layout[PYORCH_MAX_ROLES][48]; // the order for the fastest kernels: "plain", the order of the file, or the
                                           // name of the order that pyorch_model_map_repack makes on this processor
} pyorch_layer_info;

// Reads the metadata of a GGUF, shards included. A model without routed experts has n_moe_layers 0.
pyorch_status pyorch_model_map_open(const char * path, pyorch_model_map ** map);
void          pyorch_model_map_free(pyorch_model_map * map); // engines keep their own copy

// Lets engines that are made of the map afterwards read experts from the pack at path (docs/reference/packs.md). Slots
// get the pack's sizes. REQUIRES: the pack belongs to this model. Returns PYORCH_FORMAT if the pack is damaged, was
// written for other kernels, or does not hold exactly these experts.
pyorch_status pyorch_model_map_attach_pack(pyorch_model_map * map, const char * path);

// The largest number of other disks with copies.
#define PYORCH_MAX_COPIES 16

// Lets engines that are made of the map afterwards also read a file of it from this copy: each request goes to the disk
// that should finish it first. file: a shard of the model; the number after the last shard is its pack. disk: 1 to
// PYORCH_MAX_COPIES. REQUIRES: the caller has compared the two files; engines compare samples.
pyorch_status pyorch_model_map_add_copy(pyorch_model_map * map, int32_t file, int32_t disk, const char * path);

// Returns the XXH3 with 64 bits, the checksum of each matrix in a pack.
uint64_t pyorch_checksum(const void * data, size_t size);

pyorch_status pyorch_model_map_get_info(const pyorch_model_map * map, pyorch_model_map_info * info);

// index: 0 .. n_moe_layers-1, in the order of il
pyorch_status pyorch_model_map_get_layer(const pyorch_model_map * map, int32_t index, pyorch_layer_info * info);

// The place of a matrix of an expert, or of any tensor. The map owns path and the ggml type.
typedef struct pyorch_range {
    const char * path;
    const char * type;
    uint64_t     offset, size; // bytes
} pyorch_range;

pyorch_status pyorch_model_map_get_tensor(const pyorch_model_map * map, const char * name, pyorch_range * range);

// Returns the bytes of the tensors of block il without matrices of routed experts; 0 if there is no such block.
uint64_t pyorch_model_map_dense_bytes(const pyorch_model_map * map, int32_t il);

// Returns the range in the model, or in the pack of a slim one. PYORCH_FORMAT if a slim model has no pack, or if the
// pack holds the layer compressed.
pyorch_status pyorch_model_map_get_range(
    const pyorch_model_map * map, int32_t il, int32_t expert, int32_t role, pyorch_range * range);

// Brings a matrix of any expert of the layer from the order of the file into the order that layout names, in place and
// with the same size. PYORCH_INVALID if the layout is "plain". Several threads may call it at once.
pyorch_status pyorch_model_map_repack(
    const pyorch_model_map * map, int32_t il, int32_t role, void * matrix, uint64_t size);

// The cost of each order of a matrix on one core of this processor, in nanoseconds a byte.
typedef struct pyorch_layout_rates {
    double   repacking;   // pyorch_model_map_repack
    double   plain[2];    // a product of the matrix in the order of the file, with 1 input, and with n_inputs
    double   repacked[2]; // the same with a repacked matrix
    uint64_t n_inputs;
} pyorch_layout_rates;

// Measures with 72 MiB of matrices of the same type and shape, for some tenths of a second. PYORCH_INVALID if the
// layout is "plain".
pyorch_status pyorch_measure_layouts(
    const pyorch_model_map * map, int32_t il, int32_t role, pyorch_layout_rates * rates);

// A value of the metadata. One of the three fields is set, the others are 0 and NULL. The map owns text.
typedef struct pyorch_value {
    char         kind; // 'i', 'f' or 's'; 0: no value
    int64_t      integer;
    double       number;
    const char * text;
} pyorch_value;

// Reads a value. index: the element of an array of integers.
void pyorch_model_map_get_value(const pyorch_model_map * map, const char * key, int32_t index, pyorch_value * value);

//
// planes and codecs
//

// The codecs of packs (docs/reference/packs.md). A number of the ggml types bf16, f16 and f32 divides into its exponent
// (one byte) and its sign with the mantissa. These functions have no state; several threads may call them at once.
typedef enum pyorch_codec {
    PYORCH_CODEC_STORED = 0, // not encoded
    PYORCH_CODEC_ZSTD   = 1,
    PYORCH_CODEC_TABLE  = 3, // exponents: the 7 most frequent ones as three bits; 2 was lz4
    PYORCH_CODEC_NIBBLE = 4, // a whole matrix of bf16, from which kernels compute
} pyorch_codec;

// Returns the bytes of the signs and mantissas of n numbers of a ggml type; 0 for a type without planes.
uint64_t pyorch_sm_bytes(const char * type, uint64_t n);

// Returns the exponents in each of n_shards shards of n exponents. The last one can have fewer, and some can be absent.
uint64_t pyorch_shard_numbers(uint64_t n, uint64_t n_shards);

// Splits n numbers (raw) into e [n] and sm [pyorch_sm_bytes].
pyorch_status pyorch_split(const char * type, const void * raw, uint64_t n, void * e, void * sm);

// Encodes raw [n] into the first `stored` bytes of to [n]; stored 0: the codec cannot make it smaller. level: for zstd,
// 0 is its default; for nibble, the numbers of a row.
pyorch_status pyorch_encode(int32_t codec, int32_t level, const void * raw, uint64_t n, void * to, uint64_t * stored);

// Decodes. PYORCH_FORMAT if the bytes are no encoding of n bytes; raw [n] is then undefined.
pyorch_status pyorch_decode(int32_t codec, const void * stored, uint64_t stored_bytes, void * raw, uint64_t n);

// Combines e [e_bytes], n stored exponents, and sm [pyorch_sm_bytes] into raw, n numbers. PYORCH_FORMAT as above.
pyorch_status pyorch_recover(
    const char * type, int32_t codec, const void * e, uint64_t e_bytes, const void * sm, uint64_t n, void * raw);

// Returns the bytes of PYORCH_CODEC_NIBBLE for a matrix of this shape; 0 if such matrices do not have that form.
uint64_t pyorch_nibble_bytes(const char * type, uint64_t n_in, uint64_t n_out);

// Measures how long a thread multiplies such matrices with a row, from memory and not from caches, relative to plain
// ones. Takes some tenths of a second and 64 MiB.
pyorch_status pyorch_nibble_pace(uint64_t n_in, uint64_t n_out, double * ratio);

//
// engine
//

typedef struct pyorch_engine pyorch_engine;

typedef enum pyorch_policy {
    PYORCH_LRU     = 0, // evicts the least recently used expert
    PYORCH_LFU     = 1, // evicts the least frequently used expert; old uses fade
    PYORCH_FINEMOE = 2, // evicts the lowest frequency times forecast probability (FineMoE, section 4.5)
    PYORCH_BELADY  = 3, // evicts the expert with the farthest next use; only in a replay, which knows it
    PYORCH_LEARNED = 4, // evicts the lowest value, learned from the uses of layers: see pyorch_set_learned

    // Only for replays, for comparison.
    PYORCH_FIFO    = 5, // evicts the expert that was loaded first
    PYORCH_MARKING = 6, // evicts a random expert that was not used since all others were (Fiat et al. 1991)
} pyorch_policy;

// Reads bytes of shard `file` (0-based) from offset into buf. Returns the number of bytes, which may be short only at
// the end of the file, or a negative errno. Several threads call it at once.
typedef int64_t (*pyorch_read_fn)(void * user, int32_t file, uint64_t offset, void * buf, uint64_t size);

// The reader of the map's files. Threads always call a callback.
typedef enum pyorch_reader {
    PYORCH_READER_AUTO     = 0, // io_uring if the kernel allows it and reads are direct, otherwise threads
    PYORCH_READER_IO_URING = 1, // one thread starts the reads; PYORCH_INVALID if that is impossible
    PYORCH_READER_THREADS  = 2, // each thread waits for its read
} pyorch_reader;

enum { PYORCH_MAX_DEVICES = 16 }; // llama.cpp's limit

typedef struct pyorch_config {
    uint64_t       budget_bytes; // for all expert memory; at or above slots_bytes: all experts, the default
    int32_t        policy;       // pyorch_policy; default PYORCH_LEARNED
    int32_t        read_depth;   // requests in flight; each thread has one. 0: 4, or threads to suit the processor
    int32_t        direct_io;    // nonzero, the default: O_DIRECT if the file has it and experts are large enough
    int32_t        reader;       // pyorch_reader; default PYORCH_READER_AUTO
    uint64_t       read_bytes;   // largest request; 0: 1 MiB, for threads 4 MiB
    pyorch_read_fn read;         // NULL: the files of the map
    void *         read_user;
    uint64_t       plain;    // nonzero: experts keep the order of the file; default: they are repacked after a read,
                             // see pyorch_layer_info.layout, as llama.cpp does with use_extra_bufts
    uint64_t stock;          // nonzero: only llama.cpp's kernels multiply experts; default 0. Not with nibbles.
    double   pool_shares[4]; // see pyorch_set_pools; default: all for full experts
    int32_t  recovery;       // pyorch_recovery; default PYORCH_RECOVERY_KERNELS
    // Devices of pyorch_find_device compute with experts in their memory. Each has consecutive layers with experts, up
    // to the number in device_ends, and together they have all. device_bytes: memory of each for experts, default 0;
    // see pyorch-devices.h.
    uint64_t n_devices; // default 0
    void *   devices[PYORCH_MAX_DEVICES];
    int32_t  device_ends[PYORCH_MAX_DEVICES];
    uint64_t device_bytes[PYORCH_MAX_DEVICES];
    uint64_t device_misses; // pyorch_device_misses; default PYORCH_PROCESSOR
    uint64_t device_ahead;  // upload up to so many predicted experts of a layer ahead, at most 64; default 0. Not with
                            // automatic prediction: see pyorch_set_prefetch
    uint64_t
        device_prompt; // for a ubatch of so many tokens, at least 32, missing experts are uploaded, a layer at a time;
                       // for fewer the processor computes them; default 0: 32
} pyorch_config;

// The order in which a layer's matrices are read and recovered from a compressed pack.
typedef enum pyorch_recovery {
    PYORCH_RECOVERY_KERNELS  = 0, // the order of the kernels: all experts with one matrix, then all with the next
    PYORCH_RECOVERY_AFFINITY = 1, // algorithm 1 of ZipMoE: expert by expert, so that no thread waits for a disk
    PYORCH_RECOVERY_EXPONENTS_FIRST = 2, // the same with the paper's reads: all exponents of a block first
} pyorch_recovery;

// The treatment of an expert that the device lacks when its layer needs it.
typedef enum pyorch_device_misses {
    PYORCH_PROCESSOR = 0, // the processor computes it from host memory; a more valuable expert is uploaded meanwhile
    PYORCH_UPLOAD    = 1, // it is uploaded first and computed on the device, if the layer has slots left
} pyorch_device_misses;

extern const pyorch_config pyorch_default_config;

// Makes an engine and starts its reader. The map is copied. PYORCH_BUDGET below floor_bytes.
pyorch_status pyorch_engine_new(const pyorch_model_map * map, const pyorch_config * config, pyorch_engine ** engine);

// Frees an engine. REQUIRES: the models loaded under it, and their contexts, are freed. In a forked child it does
// nothing: the child has none of the engine's threads and must not use the engine.
pyorch_status pyorch_engine_free(pyorch_engine * engine);

// Models that the calling thread loads from now on, from the files of the engine's map, leave their experts to the
// engine. NULL ends that. Loads of other files are not affected.
pyorch_status pyorch_engine_capture(pyorch_engine * engine);

// Both sentences are valid until the thread calls the function again.
//
// Returns why the engine failed its last failed decode, "" if none, for programs that watch other threads' contexts.
const char * pyorch_engine_error(pyorch_engine * engine);

// Returns why an engine failed a llama_decode of the calling thread since the last call of this function, "" if none
// did. Call it before and after a decode: the second sentence is about that decode.
const char * pyorch_decode_error(void);

pyorch_status pyorch_set_budget(pyorch_engine * engine, uint64_t budget_bytes);
pyorch_status pyorch_set_policy(pyorch_engine * engine, int32_t policy);

// Divides the budget among the forms of a compressed pack's experts: full, compressed, signs and mantissas only,
// exponents only (ZipMoE, section 3.2: the pools F, C, S, E). shares[4]: 0 to 1, with the sum 1. Full experts always
// get the memory of pinned ones and of the largest layer's needs. Without compressed experts all are full.
pyorch_status pyorch_set_pools(pyorch_engine * engine, const double * shares);

// Sets the use counts of a layer's n experts from which the ranks of pools start; from 0 on. Copied. Uses fade with a
// half-life of 128 tokens. Has no effect without compressed experts.
pyorch_status pyorch_set_uses(pyorch_engine * engine, int32_t il, const double * uses, int32_t n);

// The state of the policy PYORCH_LEARNED. n_expert: of the widest layer; rows of others end with unused numbers.
typedef struct pyorch_learned {
    int32_t n_layers, n_expert, n_tables, n_counts, n_weights;
    float * weights; // [n_weights] of the features, and the sums of their squared gradients
    float * counts;  // [n_layers][n_counts][n_expert] fading use counts, 0 to 1
    float * bias;    // [n_layers][n_expert]
    float * tables;  // [n_layers][n_tables][n_expert][n_expert]

    // The last tokens, the oldest first: masks of the experts that they used, and the index of the previous token of
    // the same context, or -1.
    int32_t   n_moments, n_moment_words;
    int32_t * moments;  // [n_moments][n_layers][n_moment_words]
    int32_t * previous; // [n_moments]
} pyorch_learned;

// Fills in the sizes, and copies to arrays that are not NULL. moments and previous have room for n_moments tokens; the
// newest are copied, and n_moments becomes their number. PYORCH_INVALID under another policy.
pyorch_status pyorch_get_learned(pyorch_engine * engine, pyorch_learned * learned);

// Restores the state. Copied. PYORCH_INVALID under another policy, for other sizes, and for impossible numbers.
pyorch_status pyorch_set_learned(pyorch_engine * engine, const pyorch_learned * learned);

//
// disk
//

typedef struct pyorch_disk_speed {
    double   bytes_per_second;
    double   cores;      // cores that this process kept busy
    uint64_t read_bytes; // the settings of the reads, as in pyorch_config
    int32_t  read_depth;
    int32_t  reader;   // pyorch_reader, never PYORCH_READER_AUTO
    int32_t  direct;   // past the page cache
    int32_t  reserved; // 0
} pyorch_disk_speed;

// Reads experts in random order for so many seconds, as an engine with this configuration would, without computing.
pyorch_status pyorch_measure_disk(
    const pyorch_model_map * map, const pyorch_config * config, double seconds, pyorch_disk_speed * speed);

//
// residency
//

// Sets the fewest experts of a layer that eviction leaves (min), and the most that it may hold (max). A running layer
// may exceed max. Default 0 and n_expert.
pyorch_status pyorch_set_layer_limits(pyorch_engine * engine, int32_t il, int32_t min, int32_t max);

enum {
    PYORCH_RESIDENT  = 1, // all matrices are in memory
    PYORCH_LOADING   = 2,
    PYORCH_PINNED    = 4,  // by pyorch_pin
    PYORCH_IN_USE    = 8,  // by a running layer
    PYORCH_ON_DEVICE = 16, // in the memory of the device, whether or not in host memory
};

// Writes the flags of each expert of the layer to mask[n]; n is n_expert.
pyorch_status pyorch_get_residency(pyorch_engine * engine, int32_t il, uint8_t * mask, int32_t n);

// Queues reads after all demand, in the given order, and returns at once. Skips resident experts.
pyorch_status pyorch_prefetch(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// Loads experts and never evicts them until they are unpinned. PYORCH_BUDGET if the rest would fall below the floor.
pyorch_status pyorch_pin(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);
pyorch_status pyorch_unpin(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// Offers the bytes of an expert as the model's file has them, all matrices in the order of pyorch_layer_info.role.
// Copied. The next load takes them and reads nothing. Ignored if the expert is resident or loading, and for packs.
pyorch_status pyorch_offer(pyorch_engine * engine, int32_t il, int32_t expert, const void * bytes, uint64_t size);

// Frees the memory of resident experts that are neither pinned nor in use.
pyorch_status pyorch_evict(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// Waits until no prediction runs and no read is queued or running. Decodes compressed experts meanwhile.
pyorch_status pyorch_wait_idle(pyorch_engine * engine);

// A counter is one line in its part of this struct, and the line that counts. Python and /metrics take names and
// sentences from here.
typedef struct pyorch_stats {
    // counters, of each layer too
    uint64_t hits;              // uses of experts that found them in memory
    uint64_t misses;            // uses of experts that waited for a read, or for the rest of one
    uint64_t loads;             // experts read
    uint64_t prefetch_loads;    // experts prefetched
    uint64_t prefetch_hits;     // prefetched experts that were then used
    uint64_t prefetch_late;     // prefetched experts that were used before they had arrived completely
    uint64_t prefetch_wasted;   // experts prefetched, at least in part, for a wrong guess
    uint64_t evictions;         // experts evicted
    uint64_t bytes_read;        // bytes of experts read
    uint64_t stall_ns;          // time in which at least one compute thread slept for an expert
    uint64_t compressed_hits;   // misses with all parts of the compressed expert in memory, so nothing was read;
                                // experts of a streamed layer's window count neither here nor below
    uint64_t sm_hits;           // misses with the expert's signs and mantissas in memory
    uint64_t e_hits;            // misses with the expert's exponents in memory
    uint64_t device_hits;       // uses that found the expert in the memory of the device; not counted as hits above
    uint64_t device_misses;     // uses of all other experts
    uint64_t device_computed;   // uses that the device computed: hits, and uploads for the present layer
    uint64_t device_loads;      // experts uploaded into slots of the device
    uint64_t device_evictions;  // experts evicted from the device
    uint64_t device_bytes;      // bytes uploaded to the device, into slots and for prompts
    uint64_t device_ahead;      // experts that forecasts uploaded to the device before their layer
    uint64_t device_ahead_hits; // experts uploaded ahead that the layer used; they are hits of the device
    uint64_t device_ahead_late; // experts to upload ahead that the layer had to upload itself

    // gauges, of each layer too
    uint64_t resident_experts; // experts in memory
    uint64_t resident_bytes;   // bytes of the experts in memory
    uint64_t device_experts;   // experts in slots of the device

    // counters of the engine
    uint64_t read_ns;          // time with reads in flight; for reader threads, the sum of their times
    uint64_t failures;         // decodes that failed
    uint64_t layer_passes;     // layers computed, of each ubatch
    uint64_t tokens;           // tokens routed, summed over layers
    uint64_t decoded_bytes;    // bytes of compressed experts that were recovered, in decoded form
    uint64_t decode_ns;        // time of recovering them, summed over threads
    uint64_t device_upload_ns; // time of uploads, summed over threads

    // gauges of the engine
    uint64_t stored_bytes;        // memory of stored parts of compressed experts
    uint64_t used_bytes;          // memory that experts occupy
    uint64_t peak_bytes;          // highest memory that experts have occupied
    uint64_t budget_bytes;        // memory that experts may occupy
    uint64_t device_used_bytes;   // memory of the device in use by slots, areas and rows of the processor
    uint64_t device_budget_bytes; // memory of the device for these
} pyorch_stats;

// il -1: the whole engine.
pyorch_status pyorch_get_stats(pyorch_engine * engine, int32_t il, pyorch_stats * stats);

// All layers at one moment, in the order of il. The caller owns the arrays. n_expert: of the widest layer; rows of
// others end with zeros.
typedef struct pyorch_snapshot {
    int32_t        n_layers, n_expert;
    uint8_t *      flags;  // [n_layers][n_expert] PYORCH_RESIDENT and so on
    uint64_t *     uses;   // [n_layers][n_expert] hits and misses of each expert
    pyorch_stats * layers; // [n_layers] as pyorch_get_stats of one layer
    pyorch_stats   stats;  // of the whole engine
} pyorch_snapshot;

// Fills in a snapshot. flags NULL: only the sizes and stats.
pyorch_status pyorch_get_snapshot(pyorch_engine * engine, pyorch_snapshot * snapshot);

// Writes to counts[n] how often the router of a layer selected each of its n experts, for tokens of this engine's
// contexts, on any server, since the engine was made. n is n_expert.
pyorch_status pyorch_get_activations(pyorch_engine * engine, int32_t il, uint64_t * counts, int32_t n);

// Zeroes the counters, but not the gauges.
pyorch_status pyorch_reset_stats(pyorch_engine * engine);

//
// prediction: prefetches, lossless
//

// The predictor of later layers' experts, which runs while a layer of a decoding ubatch computes.
typedef enum pyorch_predictor {
    PYORCH_PREDICT_NONE         = 0,
    PYORCH_PREDICT_QUASI_HIDDEN = 1, // their router, applied to an estimated input: see pyorch_set_default_vectors
    PYORCH_PREDICT_HYBRID       = 2, // the same, corrected by a trained network (pyorch_set_estimator) for the next
                                     // layer, unless pyorch_set_hybrid excludes it
    PYORCH_PREDICT_EXPERT_MAP = 3,   // the experts that the most similar iteration used: see pyorch_set_history
    PYORCH_PREDICT_ORACLE     = 4,   // in a replay: the recording's forecasts, such as the truth
} pyorch_predictor;

// Sets the predictor of one layer; il -1: of every layer. distance: layers ahead at most, at least 1. min_precision:
// guesses with a lower measured precision are not prefetched; 0: all are; below 0: those that gain more than they cost,
// as measured. automatic, for every layer: nonzero: predict only while experts are absent, stop if a trial shows that
// decoding is faster without, and load into host memory only. PYORCH_INVALID if the predictor applies routers,
// automatic is 0, and a graph has a router that cannot be applied.
pyorch_status pyorch_set_prefetch(
    pyorch_engine * engine, int32_t il, int32_t predictor, int32_t distance, double min_precision, int32_t automatic);

// Returns PYORCH_INVALID, with the layer and the reason, if a chosen predictor applies routers, or layers are
// speculated, and a graph has a router that cannot be applied. Call it after a context is made: before, no graph is
// known.
pyorch_status pyorch_check_routers(pyorch_engine * engine);

// How probabilities are made of a router's logits. The numbers are those of GGUF's expert_gating_func.
typedef enum pyorch_gating {
    PYORCH_GATING_SOFTMAX          = 1,
    PYORCH_GATING_SIGMOID          = 2,
    PYORCH_GATING_SOFTMAX_SELECTED = 3, // of the logits of the selected; they are selected by logits
    PYORCH_GATING_SQRT_SOFTPLUS    = 4,
} pyorch_gating;

// How a layer chooses its experts: logits = gate * input + bias, probabilities = gating(logits). It selects the n_used
// experts with the highest probability + selection_bias, from the n_groups_used groups of experts with the highest sums
// of their two highest; n_groups 1: no groups. The weights are their probabilities, divided by their sum if normalized,
// times scale. Arrays may be NULL except gate.
typedef struct pyorch_router {
    int32_t       n_expert;
    int32_t       n_embd;
    int32_t       n_used;
    int32_t       gating;        // pyorch_gating; default PYORCH_GATING_SOFTMAX
    int32_t       n_groups;      // of consecutive experts, equally many in each; default 1
    int32_t       n_groups_used; // default 1
    int32_t       normalized;
    float         scale;          // default 1
    const float * gate;           // [n_expert][n_embd]
    const float * bias;           // [n_expert] of the logits
    const float * selection_bias; // [n_expert] for the choice only
    const float * norm;           // [n_embd] of the RMS normalization that makes the input
    float         eps;            // of the same
} pyorch_router;

// Returns the router in use. Its arrays belong to the model loaded under the engine, or to the engine after
// pyorch_set_router. PYORCH_INVALID if there is none: no context was made yet, or the router cannot be applied.
pyorch_status pyorch_get_router(pyorch_engine * engine, int32_t il, pyorch_router * router);

// Mean outputs of the experts of a layer, [n_expert][n_embd], for quasi-hidden states (Speculating Experts, section 3).
// Copied, in 8 or 16 bits a value.
pyorch_status pyorch_set_default_vectors(
    pyorch_engine * engine, int32_t il, const float * vectors, int32_t n_expert, int32_t n_embd);

// A network that corrects the logits which the router of the next layer gives for a quasi-hidden state (Speculating
// Experts, appendix A). n_layers: the number of first layers with experts whose states are its input.
typedef struct pyorch_estimator {
    int32_t       n_embd, n_latent, n_hidden, n_layers, n_expert;
    const float * in_weight;   // [n_latent][n_embd]
    const float * in_bias;     // [n_latent]
    const float * position;    // [n_layers][n_latent], by the layer whose state is the input
    const float * up_weight;   // [n_hidden][n_latent]
    const float * up_bias;     // [n_hidden]
    const float * down_weight; // [n_latent][n_hidden]
    const float * down_bias;   // [n_latent]
    const float * norm_weight; // [n_latent] LayerNorm, epsilon 1e-5
    const float * norm_bias;   // [n_latent]
    const float * head_weight; // [n_layers][n_expert][n_latent]
    const float * head_bias;   // [n_layers][n_expert]
} pyorch_estimator;

// Copied, matrices in 8 or 16 bits a weight. PYORCH_INVALID if it does not fit the layers of the model.
pyorch_status pyorch_set_estimator(pyorch_engine * engine, const pyorch_estimator * estimator);

// layers[n]: in the order of il, nonzero if hybrid uses the estimator for that layer, otherwise quasi-hidden. Default:
// all.
pyorch_status pyorch_set_hybrid(pyorch_engine * engine, const uint8_t * layers, int32_t n);

// While on, sums up the outputs of all experts, for pyorch_get_mean_outputs. Turning it on starts from zero.
pyorch_status pyorch_set_calibration(pyorch_engine * engine, int32_t on);

// vectors [n_expert][n_embd]: mean output of each expert since calibration began, 0 if it was never used;
// counts [n_expert]: the number of its uses.
pyorch_status pyorch_get_mean_outputs(
    pyorch_engine * engine, int32_t il, float * vectors, uint64_t * counts, int32_t n_expert, int32_t n_embd);

//
// speculation: lossy, off until set
//

// Layers compute with the experts and weights that were forecast for them one layer earlier, in place of their routers'
// choice, and read nothing else (Speculating Experts, section 4). The first layer keeps its router's choice; so does a
// layer without a forecast one layer ahead. If pyorch_set_substitution treats absent experts, the router's choice
// stays: forecast experts count as resident, and the others are treated as absent.
typedef enum pyorch_speculate {
    PYORCH_SPECULATE_NONE   = 0,
    PYORCH_SPECULATE_DECODE = 1, // ubatches of one token of each sequence
    PYORCH_SPECULATE_ALL    = 2, // prompts too: shows the loss of accuracy
} pyorch_speculate;

pyorch_status pyorch_set_speculation(pyorch_engine * engine, int32_t mode);

// Counts since pyorch_reset_stats. A slot is one of the n_expert_used of a token.
typedef struct pyorch_speculation_counts {
    uint64_t tokens; // of the affected ubatches, counted in each layer
    uint64_t slots;  // with a forecast expert
    uint64_t right;  // of these slots, those with the router's choice
} pyorch_speculation_counts;

pyorch_status pyorch_get_speculation_counts(pyorch_engine * engine, pyorch_speculation_counts * counts);

//
// observers
//

// A layer's routing of one ubatch. Arrays are valid during the call, row-major by token.
typedef struct pyorch_routing {
    const void *    context; // identifies the context
    int32_t         il;
    int32_t         decode; // nonzero: one token of each sequence
    int32_t         n_tokens;
    int32_t         n_expert;
    int32_t         n_expert_used;
    int32_t         n_embd;    // of the hidden state
    const int32_t * experts;   // [n_tokens][n_expert_used]
    const float *   weights;   // [n_tokens][n_expert_used] factors of the outputs
    const float *   probs;     // [n_tokens][n_expert] after gating
    const float *   logits;    // [n_tokens][n_expert] of the router
    const float *   inputs;    // [n_tokens][n_embd] of the router
    const float *   residuals; // [n_tokens][n_embd] the inputs before their RMS normalization, or NULL
} pyorch_routing;

// Called on a compute thread, between router and experts: it must return quickly.
typedef void (*pyorch_observer_fn)(void * user, const pyorch_routing * routing);

// Sets the observer of an engine; NULL removes it. After the call no call of the old one is running.
pyorch_status pyorch_set_observer(pyorch_engine * engine, pyorch_observer_fn observer, void * user);

//
// history: expert maps of past iterations (FineMoE)
//

typedef struct pyorch_history pyorch_history;

// n_expert: of the widest layer. n_embd 0: no embeddings. capacity: in iterations. distance: of prefetching, for the
// redundancy score by which a new iteration replaces another in a full store.
pyorch_status pyorch_history_new(
    int32_t n_layers, int32_t n_expert, int32_t n_embd, int32_t capacity, int32_t distance, pyorch_history ** history);
void pyorch_history_free(pyorch_history * history); // engines keep their reference

// Predictors of the engine search the history and add the engine's decodes. NULL: no history, and no guesses from it.
pyorch_status pyorch_set_history(pyorch_engine * engine, pyorch_history * history);

// Adds an iteration: embedding [n_embd], or NULL, and the distributions of its routers, map [n_layers][n_expert].
pyorch_status pyorch_history_add_map(pyorch_history * history, const float * embedding, const float * map);

pyorch_status pyorch_history_size(const pyorch_history * history, int32_t * n_maps);

// Copies embeddings [n_maps][n_embd] and maps [n_maps][n_layers][n_expert]; either may be NULL. n_maps: the available
// room, then the number of maps; a running engine adds more.
pyorch_status pyorch_history_export(
    const pyorch_history * history, float * embeddings, float * probs, int32_t * n_maps);

//
// substitution: lossy, off until set
//

typedef enum pyorch_substitute_mode {
    PYORCH_SUBSTITUTE_NONE    = 0,
    PYORCH_SUBSTITUTE_BUDDIES = 1, // a buddy of the lists of pyorch_set_buddies
    PYORCH_SUBSTITUTE_RANDOM  = 2, // any resident expert, a baseline
    PYORCH_SUBSTITUTE_CACHE   = 3, // the resident expert that the router ranks highest, with its own weight
} pyorch_substitute_mode;

typedef enum pyorch_substitute_order {
    PYORCH_ORDER_RANK   = 0, // the router's ranks
    PYORCH_ORDER_WEIGHT = 1, // lowest weight first
} pyorch_substitute_order;

typedef enum pyorch_on_miss {
    PYORCH_MISS_FETCH = 0, // wait for the expert
    PYORCH_MISS_DROP  = 1, // omit it
    PYORCH_MISS_GHOST = 2, // its ghost computes in its place; without a ghost, omit it
} pyorch_on_miss;

// How a layer treats absent experts, by BuddyMoE's gates in their order. Each gate can be off. A replaced expert is
// read when no other read is needed, if it is more valuable than the expert that it evicts.
typedef struct pyorch_substitution {
    int32_t mode;            // pyorch_substitute_mode
    int32_t prefill;         // nonzero: also in ubatches with several tokens of a sequence
    int32_t max_per_token;   // most slots of a token in this layer that are replaced or omitted, 0: no limit
    int32_t order;           // pyorch_substitute_order: the order in which a token's absent experts are treated
    int32_t on_miss;         // pyorch_on_miss, if the gates allow a replacement but no buddy is available
    double  tau;             // no replacement if the token activating entropy is at most this (below 0: off)
    double  temperature;     // of the probabilities for tau and gamma, 1: unchanged
    double  gamma;           // no replacement if the two largest probabilities differ by at least this (above 1: off)
    double  beta;            // no replacement if at least this share of the requested experts is absent (above 1: off)
    double  read_budget;     // above 0: beta adapts, so that a ubatch waits for so many bytes of experts on average
    double  eta;             // factor of the router's logit in a buddy's priority, 0: none
    double  kappa;           // factor of the hops to a buddy in its priority, 0 to 0.5: from the memory that the layer
                             // computes from (a device if there is one) to host memory, and to another server
    double   reuse;          // factor of a buddy's priority for each token of the ubatch that already uses it, 0 to 1
    uint64_t seed;           // of random substitution
    int32_t  sacred;         // number of a token's heaviest experts that are never replaced or omitted
    int32_t  among;          // PYORCH_SUBSTITUTE_CACHE: only among so many of the router's highest, 0: all
    double   bonus;          // PYORCH_SUBSTITUTE_CACHE: no expert with a logit lower by more than this
    int32_t  max_all_layers; // max_per_token for all layers of a token together, in their order, 0: no limit
    double   max_weight; // no expert of this weight or more, relative to the average weight of a token's experts: over
                         // all tokens and layers since a substitution was set (infinite: off)
} pyorch_substitution;

// Nothing is replaced, every gate is off, and absent experts are fetched.
extern const pyorch_substitution pyorch_default_substitution;

pyorch_status pyorch_set_substitution(pyorch_engine * engine, int32_t il, const pyorch_substitution * substitution);

// ids: [n_expert][k_max], best first; -1 after the last. q: their similarities, from which priorities are computed.
// PYORCH_INVALID for ids that do not exist.
pyorch_status pyorch_set_buddies(
    pyorch_engine * engine, int32_t il, int32_t n_expert, int32_t k_max, const int32_t * ids, const float * q);

// Counters of ubatches to which substitution applies. A slot is one of the n_expert_used of a token.
typedef struct pyorch_substitution_counts {
    // counters, of each layer too
    uint64_t tokens;
    uint64_t lossy_tokens; // tokens with a replaced or omitted expert
    uint64_t substituted;  // slots computed by another expert
    uint64_t dropped;      // slots omitted
    uint64_t refused_tae;  // absent slots, by the first gate that refused
    uint64_t refused_margin;
    uint64_t refused_distribution;
    uint64_t refused_rho;     // max_per_token or max_all_layers was reached
    uint64_t refused_buddies; // no buddy was resident and free
    uint64_t rank_sum;        // ranks of the used buddies in their lists
    uint64_t absent;          // absent experts that the ubatches requested
    uint64_t avoided;         // absent experts that no slot requested any more
    uint64_t refused_sacred;  // absent slots among a token's heaviest, or with max_weight or more
    uint64_t ghosts;          // slots computed by ghosts
    uint64_t on_their_way;    // slots substituted, dropped or computed by ghosts while their expert was loading: a
                              // matter of time, unless the cache is simulated
} pyorch_substitution_counts;

// Returns the counters; il -1: of all layers. pyorch_reset_stats zeroes them.
pyorch_status pyorch_get_substitution_counts(pyorch_engine * engine, int32_t il, pyorch_substitution_counts * counts);

// Estimates of a layer's absent experts: the mean output of each, and a linear map of low rank from the router's input
// x to the difference, y = mean + sum over its rows r of up[r] <down[r], x>. Rows of expert 0 come first, then those of
// expert 1, and so on.
typedef struct pyorch_ghosts {
    int32_t         n_expert;
    int32_t         n_in;   // values of x
    int32_t         n_out;  // values of y: the expert's output, before the router's weight
    int32_t         n_rows; // sum of the ranks
    const int32_t * rank;   // [n_expert], -1: no ghost
    const float *   mean;   // [n_expert][n_out]
    const float *   down;   // [n_rows][n_in]
    const float *   up;     // [n_rows][n_out]
} pyorch_ghosts;

// Copies ghosts, with 8 bits a number. PYORCH_INVALID for ghosts of other experts. pyorch_set_substitution decides when
// they are used.
pyorch_status pyorch_set_ghosts(pyorch_engine * engine, int32_t il, const pyorch_ghosts * ghosts);

#ifdef __cplusplus
}
#endif

#endif
