// pyorch: run Mixture-of-Experts models whose experts do not fit in memory.
//
// The C API of libpyorch. A model map says where each routed expert of a GGUF lies; an engine keeps
// a budgeted set of them resident while llama.cpp computes. Layers are named by llama.cpp's block
// number il, experts by their index in the layer.
//
// This header has what every program needs: models, budgets, what is read ahead, lossy settings, statistics. Beside it
// lie pyorch-devices.h (devices above host memory), pyorch-cluster.h (servers that compute for each other) and
// pyorch-replay.h (recorded routings in simulated time, and what only evaluations ask).
//
// Every function that returns pyorch_status leaves a sentence in pyorch_last_error() when it does
// not return PYORCH_OK, and then has changed nothing. All functions may be called from any thread
// unless said otherwise. cffi parses this file: declarations only below the guard.
//
// Calls and structs are those of PYORCH_ABI; a struct of settings begins as zeros, or as its pyorch_default_*.
//
// The callbacks (pyorch_read_fn, pyorch_observer_fn) run while the engine waits for them. Inside one, the thread may ask
// (pyorch_get_*, pyorch_engine_error, pyorch_decode_error, and everything of the library, the model map and the history)
// and order (pyorch_prefetch, pyorch_pin, pyorch_unpin, pyorch_evict).
// Every other function of an engine, also of another one, returns PYORCH_CALLBACK there: it might wait for the callback
// itself. A decode with managed experts fails there. A callback must not wait for a thread that does any of this.

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
    PYORCH_FORMAT   = 2, // a file is not what it should be
    PYORCH_IO       = 3, // the operating system refused
    PYORCH_BUDGET   = 4, // the budget is too small for what was asked
    PYORCH_MEMORY   = 5, // the system has no memory for what was asked
    PYORCH_CALLBACK = 6, // not inside a callback
} pyorch_status;

// The sentence for the last failure on this thread. Valid until the thread's next call.
const char * pyorch_last_error(void);

// The calls and structs that a program was compiled with: a library of another number does not fit.
enum { PYORCH_ABI = 8 };

int32_t      pyorch_abi(void);     // the PYORCH_ABI that the library was compiled with
const char * pyorch_version(void); // "1.2.3"

// What can be chosen among by name. The values of a choice are those of the enum.
typedef enum pyorch_choices {
    PYORCH_CHOICES_POLICY           = 0, // pyorch_policy
    PYORCH_CHOICES_PREDICTOR        = 1, // pyorch_predictor
    PYORCH_CHOICES_SPECULATE        = 2, // pyorch_speculate
    PYORCH_CHOICES_SUBSTITUTE_MODE  = 3, // pyorch_substitute_mode
    PYORCH_CHOICES_SUBSTITUTE_ORDER = 4, // pyorch_substitute_order
    PYORCH_CHOICES_ON_MISS          = 5, // pyorch_on_miss
    PYORCH_CHOICES_GATING           = 6, // pyorch_gating
} pyorch_choices;

// What a choice works with.
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
    PYORCH_NEEDS_REPLAY          = 2048, // a replay: it is there to be compared with
};

typedef struct pyorch_choice {
    int32_t      value;       // of the enum
    uint32_t     needs;       // flags PYORCH_NEEDS_*: without one of them it does nothing
    uint32_t     uses;        // flags of what makes it better
    int32_t      executable;  // nonzero: a predictor whose forecasts can be computed with, see pyorch_set_speculation
    const char * name;        // such as "lru"; what users type
    const char * description; // one line
} pyorch_choice;

// index: 0 and up. NULL behind the last.
const pyorch_choice * pyorch_get_choice(int32_t choices, int32_t index);

//
// llama.cpp's fatal errors
//

// They end the process. From now on their sentence goes to the stderr of the first call, also while the process has
// redirected its stderr, as llama-cpp-python does when it loads a model.
void pyorch_show_fatal_errors(void);

// A line "pyorch: ..." for people, to that stderr.
void pyorch_notice(const char * line);

// Computes on these processors only, of those that the calling thread may use, and reads experts on the others; none:
// where the system places threads. Of the whole process, from the next decode on. Linux only.
pyorch_status pyorch_set_compute_cpus(const int32_t * cpus, int32_t n_cpus);

// on, until as many calls with 0: on the calling thread they are exceptions instead. llama.cpp turns these into a
// failure where it loads or quantizes a model and where it makes a context, with the sentence in its log; llama-server
// turns them into the answer of a request. REQUIRES: nothing else of llama.cpp is called in between.
void pyorch_refuse_fatal_errors(int32_t on);

//
// grammars
//

// While this library is loaded, reading, applying and advancing a grammar takes some seconds at most in llama.cpp, and
// then throws. These two functions are those of llama.cpp for a program that cannot catch exceptions.

// llama_sampler_init_grammar(); lazy: llama_sampler_init_grammar_lazy_patterns(). vocab: a llama_vocab *. sampler: a
// llama_sampler *.
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
    int32_t  n_expert_used; // top-k of the router; of the layer with the largest one, if layers differ
    uint64_t file_bytes;    // all shards
    uint64_t expert_bytes;  // routed experts, as they lie in the file
    uint64_t dense_bytes;   // all other tensors
    uint64_t slots_bytes;   // what the experts occupy when all are resident (alignment included)
    uint64_t floor_bytes;   // smallest budget: twice the experts of a token and one, of the largest layer
    uint64_t slim;          // nonzero: its own file lacks the bytes of the experts, they are in a pack only
    uint64_t n_params;      // numbers in all tensors
} pyorch_model_map_info;

typedef struct pyorch_layer_info {
    int32_t  il;
    int32_t  n_expert;
    int32_t  n_expert_used; // top-k of its router; 0: the file does not say it
    int32_t  n_roles;
    char     role[PYORCH_MAX_ROLES][16];   // in the order in which the kernels need them
    char     type[PYORCH_MAX_ROLES][16];   // ggml type
    int64_t  n_in[PYORCH_MAX_ROLES];       // numbers in a row
    uint64_t expert_bytes;                 // one expert, as it lies in the file
    uint64_t slot_bytes;                   // one expert, resident
    char     layout[PYORCH_MAX_ROLES][48]; // in which the kernels are fastest: "plain", as in the file, or a name of
                                           // the order that pyorch_model_map_repack makes on this processor
} pyorch_layer_info;

// Reads the metadata of a GGUF, shards included. A model without routed experts has n_moe_layers 0.
pyorch_status pyorch_model_map_open(const char * path, pyorch_model_map ** map);
void          pyorch_model_map_free(pyorch_model_map * map); // engines keep their own copy

// Engines that are made of the map afterwards read experts from the pack at path (docs/reference/packs.md). The sizes of
// slots become the pack's. REQUIRES: the pack belongs to this model. Returns PYORCH_FORMAT if the pack is damaged, was
// written for other kernels, or does not hold exactly these experts.
pyorch_status pyorch_model_map_attach_pack(pyorch_model_map * map, const char * path);

// Other disks that hold copies, at most.
#define PYORCH_MAX_COPIES 16

// Engines that are made of the map afterwards read a file of it from this copy too: each request goes to the disk that
// is expected to end it first. file: a shard of the model, or behind them, its pack. disk: 1 to PYORCH_MAX_COPIES. The
// caller has compared the two; engines compare samples.
pyorch_status pyorch_model_map_add_copy(pyorch_model_map * map, int32_t file, int32_t disk, const char * path);

// XXH3 with 64 bits: the checksum that a pack has of each matrix.
uint64_t pyorch_checksum(const void * data, size_t size);

pyorch_status pyorch_model_map_get_info(const pyorch_model_map * map, pyorch_model_map_info * info);

// index: 0 .. n_moe_layers-1, in the order of il
pyorch_status pyorch_model_map_get_layer(const pyorch_model_map * map, int32_t index, pyorch_layer_info * info);

// Where a matrix of an expert, or any tensor, lies. path and the ggml type are owned by the map.
typedef struct pyorch_range {
    const char * path;
    const char * type;
    uint64_t     offset, size; // bytes
} pyorch_range;

pyorch_status pyorch_model_map_get_tensor(const pyorch_model_map * map, const char * name, pyorch_range * range);

// Bytes of the tensors of block il that are no matrices of routed experts; 0 where there is no such block.
uint64_t pyorch_model_map_dense_bytes(const pyorch_model_map * map, int32_t il);

// In the model, but of a slim one in its pack; PYORCH_FORMAT where none is attached, or holds the layer compressed.
pyorch_status pyorch_model_map_get_range(
    const pyorch_model_map * map, int32_t il, int32_t expert, int32_t role, pyorch_range * range);

// Brings a matrix of any expert of the layer, as it lies in the file, into the order that layout names. In place, as
// many bytes: size. PYORCH_INVALID where that is "plain". May be called by several threads at once.
pyorch_status pyorch_model_map_repack(
    const pyorch_model_map * map, int32_t il, int32_t role, void * matrix, uint64_t size);

// What each order of a matrix costs a core of this processor: nanoseconds for each byte.
typedef struct pyorch_layout_rates {
    double   repacking;   // pyorch_model_map_repack
    double   plain[2];    // a product of the matrix as the file has it, with 1 input, and with n_inputs
    double   repacked[2]; // the same of a repacked matrix
    uint64_t n_inputs;
} pyorch_layout_rates;

// Measures with 72 MiB of matrices of the same type and shape, which takes some tenths of a second. PYORCH_INVALID where
// the layout is "plain".
pyorch_status pyorch_measure_layouts(
    const pyorch_model_map * map, int32_t il, int32_t role, pyorch_layout_rates * rates);

// A value of the metadata: one of the three, the others 0 and NULL. text is owned by the map.
typedef struct pyorch_value {
    char         kind; // 'i', 'f' or 's', 0: there is none
    int64_t      integer;
    double       number;
    const char * text;
} pyorch_value;

// Of an array of integers: the element at index.
void pyorch_model_map_get_value(const pyorch_model_map * map, const char * key, int32_t index, pyorch_value * value);

//
// planes and codecs
//

// The codecs of packs (docs/reference/packs.md). A number of the ggml types bf16, f16 and f32 divides into its exponent,
// one byte, and its sign with the mantissa. These functions have no state; several threads may call them at once.
typedef enum pyorch_codec {
    PYORCH_CODEC_STORED = 0, // as it is
    PYORCH_CODEC_ZSTD   = 1,
    PYORCH_CODEC_TABLE  = 3, // of exponents: the 7 commonest as three bits; 2 was lz4
    PYORCH_CODEC_NIBBLE = 4, // of a whole matrix of bf16: kernels compute from it
} pyorch_codec;

// Bytes of the signs and mantissas of n numbers of a ggml type; 0 for one that is not taken apart.
uint64_t pyorch_sm_bytes(const char * type, uint64_t n);

// How many exponents each of n_shards shards has, of n; the last one has fewer, and there may be fewer shards.
uint64_t pyorch_shard_numbers(uint64_t n, uint64_t n_shards);

// raw: n numbers -> e [n], sm [pyorch_sm_bytes]
pyorch_status pyorch_split(const char * type, const void * raw, uint64_t n, void * e, void * sm);

// raw [n] -> to [n], of which the first stored bytes are used; stored 0: the codec cannot make it smaller. level: of
// zstd, 0 for its default; for nibble the numbers of a row.
pyorch_status pyorch_encode(int32_t codec, int32_t level, const void * raw, uint64_t n, void * to, uint64_t * stored);

// The other way. PYORCH_FORMAT where the bytes are not what was stored of n; raw [n] holds anything then.
pyorch_status pyorch_decode(int32_t codec, const void * stored, uint64_t stored_bytes, void * raw, uint64_t n);

// e [e_bytes]: n exponents as they are stored; sm [pyorch_sm_bytes] -> raw: n numbers. PYORCH_FORMAT as above.
pyorch_status pyorch_recover(
    const char * type, int32_t codec, const void * e, uint64_t e_bytes, const void * sm, uint64_t n, void * raw);

// What PYORCH_CODEC_NIBBLE makes of any matrix of a shape; 0: matrices of the type and shape do not have that form.
uint64_t pyorch_nibble_bytes(const char * type, uint64_t n_in, uint64_t n_out);

// Times how long a thread multiplies such matrices with a row, from memory, not from caches: in that form, as a ratio
// to the plain one. Takes some tenths of a second, and 64 MiB.
pyorch_status pyorch_nibble_pace(uint64_t n_in, uint64_t n_out, double * ratio);

//
// engine
//

typedef struct pyorch_engine pyorch_engine;

typedef enum pyorch_policy {
    PYORCH_LRU     = 0, // least recently used goes first
    PYORCH_LFU     = 1, // least frequently used goes first, old uses fade
    PYORCH_FINEMOE = 2, // lowest frequency times forecast probability goes first (FineMoE, section 4.5)
    PYORCH_BELADY  = 3, // needed last goes first: in a replay, which knows
    PYORCH_LEARNED = 4, // lowest value goes first, as learned from what layers used: see pyorch_set_learned

    // For replays alone, to be compared with.
    PYORCH_FIFO    = 5, // what came into memory first goes first
    PYORCH_MARKING = 6, // at random, of what was not used since everything else was (Fiat et al. 1991)
} pyorch_policy;

// Bytes of shard file (0-based) from offset into buf. Returns the number of bytes read, which may be
// short only at the end of the file, or a negative errno. Called by several threads at once.
typedef int64_t (*pyorch_read_fn)(void * user, int32_t file, uint64_t offset, void * buf, uint64_t size);

// Who reads the files of the map. A callback is always called by threads.
typedef enum pyorch_reader {
    PYORCH_READER_AUTO     = 0, // io_uring where the kernel allows it and reads are direct, else threads
    PYORCH_READER_IO_URING = 1, // one thread starts the reads; PYORCH_INVALID where that cannot be
    PYORCH_READER_THREADS  = 2, // each waits for its read
} pyorch_reader;

enum { PYORCH_MAX_DEVICES = 16 }; // as llama.cpp's

typedef struct pyorch_config {
    uint64_t budget_bytes;     // for all expert memory; above slots_bytes means all, the default
    int32_t  policy;           // pyorch_policy; default PYORCH_LEARNED
    int32_t  read_depth;       // requests under way at once, of threads one each; 0: 4, or as many threads as suit
                               // the processor
    int32_t        direct_io;  // nonzero, the default: O_DIRECT where files have it and experts are large enough
    int32_t        reader;     // pyorch_reader; default PYORCH_READER_AUTO
    uint64_t       read_bytes; // one request at most; 0: 1 MiB, of threads 4 MiB
    pyorch_read_fn read;       // NULL: the files of the map
    void *         read_user;
    uint64_t       plain;    // nonzero: experts stay as they lie in the file; default: they are repacked when they
                             // arrive, see pyorch_layer_info.layout, as llama.cpp does with use_extra_bufts
    uint64_t stock;          // nonzero: llama.cpp's kernels alone multiply experts; default 0. Not with nibbles.
    double   pool_shares[4]; // see pyorch_set_pools; default: all for full experts
    int32_t  recovery;       // pyorch_recovery; default PYORCH_RECOVERY_KERNELS
    // Of pyorch_find_device: they compute with experts that lie in their memory. Each has consecutive layers, up to the
    // number in device_ends of those with experts, and all of these are somebody's. device_bytes: of the memory of each
    // for them, default 0; see pyorch-devices.h.
    uint64_t n_devices; // default 0
    void *   devices[PYORCH_MAX_DEVICES];
    int32_t  device_ends[PYORCH_MAX_DEVICES];
    uint64_t device_bytes[PYORCH_MAX_DEVICES];
    uint64_t device_misses; // pyorch_device_misses; default PYORCH_PROCESSOR
    uint64_t device_ahead;  // so many experts that a predictor names are uploaded before their layer comes, at most
                            // 64; default 0. Not while it predicts as time allows: see pyorch_set_prefetch
    uint64_t
        device_prompt; // a ubatch of so many tokens, at least 32, has what a device lacks brought there, a layer at
                       // a time; of fewer the processor computes it; default 0: 32
} pyorch_config;

// In which order the matrices of a layer are read and recovered that come from a compressed pack.
typedef enum pyorch_recovery {
    PYORCH_RECOVERY_KERNELS  = 0, // that of the kernels: all experts with one matrix, then all with the next
    PYORCH_RECOVERY_AFFINITY = 1, // that of algorithm 1 of ZipMoE: expert by expert, so that no thread waits for a disk
    PYORCH_RECOVERY_EXPONENTS_FIRST = 2, // the same with the paper's reads: first all exponents of a block
} pyorch_recovery;

// What becomes of an expert that is not in the memory of the device when its layer needs it.
typedef enum pyorch_device_misses {
    PYORCH_PROCESSOR = 0, // computes it from host memory; it is uploaded meanwhile if it is worth more than another
    PYORCH_UPLOAD    = 1, // it is uploaded first and computed on the device, as long as there are slots for the layer
} pyorch_device_misses;

extern const pyorch_config pyorch_default_config;

// Starts the reader. The map is copied. PYORCH_BUDGET below floor_bytes.
pyorch_status pyorch_engine_new(const pyorch_model_map * map, const pyorch_config * config, pyorch_engine ** engine);

// REQUIRES: the models loaded under this engine, and their contexts, are freed. Does nothing in a process that was
// forked from the engine's: that one has none of its threads, and nothing else may be done with the engine there.
pyorch_status pyorch_engine_free(pyorch_engine * engine);

// Models that the calling thread loads from now on, from the files of the engine's map, leave their
// experts to the engine. NULL ends that. A load of other files is untouched.
pyorch_status pyorch_engine_capture(pyorch_engine * engine);

// Both sentences are valid until the thread calls the function again.
//
// Why the engine failed the last of all decodes that it failed, "" if none: for who watches contexts of other threads.
const char * pyorch_engine_error(pyorch_engine * engine);

// Why an engine failed the llama_decode that the calling thread made since it last called this function, "" if none
// did: called before a decode and after it, the second sentence is that decode's.
const char * pyorch_decode_error(void);

pyorch_status pyorch_set_budget(pyorch_engine * engine, uint64_t budget_bytes);
pyorch_status pyorch_set_policy(pyorch_engine * engine, int32_t policy);

// How the budget is divided among the forms in which experts of a compressed pack are kept: full, compressed, signs and
// mantissas only, exponents only (ZipMoE, section 3.2: the pools F, C, S, E). shares[4]: 0 to 1, their sum is 1. Full
// experts get what is pinned and what the largest layer needs beside that in any case. Of a model whose experts are not
// compressed all are full, whatever the shares.
pyorch_status pyorch_set_pools(pyorch_engine * engine, const double * shares);

// What is known of a layer before it runs: how often each of its n experts was used, as if up to now; from 0 on.
// Copied. The ranks by which experts belong to pools go on from there: uses fade, with a half-life of 128 tokens.
// Without effect where experts are not compressed.
pyorch_status pyorch_set_uses(pyorch_engine * engine, int32_t il, const double * uses, int32_t n);

// What the policy PYORCH_LEARNED has learned. n_expert: of the widest layer; rows of others end with numbers that mean
// nothing.
typedef struct pyorch_learned {
    int32_t n_layers, n_expert, n_tables, n_counts, n_weights;
    float * weights; // [n_weights] of the features, and the sums of their squared gradients
    float * counts;  // [n_layers][n_counts][n_expert] fading use counts, 0 to 1
    float * bias;    // [n_layers][n_expert]
    float * tables;  // [n_layers][n_tables][n_expert][n_expert]

    // The last tokens, the oldest first: masks of the experts that they used, and the index of the token before each in
    // its context, or -1.
    int32_t   n_moments, n_moment_words;
    int32_t * moments;  // [n_moments][n_layers][n_moment_words]
    int32_t * previous; // [n_moments]
} pyorch_learned;

// Fills in the sizes, and copies to those arrays that are not NULL. moments and previous have room for n_moments tokens,
// of which the newest are copied, and n_moments becomes how many these are. PYORCH_INVALID under another policy.
pyorch_status pyorch_get_learned(pyorch_engine * engine, pyorch_learned * learned);

// Goes on from there. Copied. PYORCH_INVALID under another policy, for other sizes, and for numbers that cannot be.
pyorch_status pyorch_set_learned(pyorch_engine * engine, const pyorch_learned * learned);

//
// disk
//

typedef struct pyorch_disk_speed {
    double   bytes_per_second;
    double   cores;      // that this process kept busy meanwhile
    uint64_t read_bytes; // as it was read: as pyorch_config
    int32_t  read_depth;
    int32_t  reader;   // pyorch_reader, which is never PYORCH_READER_AUTO
    int32_t  direct;   // around the page cache
    int32_t  reserved; // 0
} pyorch_disk_speed;

// Reads experts in random order for so many seconds, as an engine with this configuration would, and computes nothing.
pyorch_status pyorch_measure_disk(
    const pyorch_model_map * map, const pyorch_config * config, double seconds, pyorch_disk_speed * speed);

//
// residency
//

// Experts of a layer that eviction leaves (min), and that it may hold (max); a running layer may
// exceed max for as long as it runs. Default 0 and n_expert.
pyorch_status pyorch_set_layer_limits(pyorch_engine * engine, int32_t il, int32_t min, int32_t max);

enum {
    PYORCH_RESIDENT  = 1, // all matrices are there
    PYORCH_LOADING   = 2,
    PYORCH_PINNED    = 4,  // by pyorch_pin
    PYORCH_IN_USE    = 8,  // by a running layer
    PYORCH_ON_DEVICE = 16, // in the memory of the device, whether or not it is in host memory too
};

// mask[n]: flags of each expert of the layer; n is n_expert.
pyorch_status pyorch_get_residency(pyorch_engine * engine, int32_t il, uint8_t * mask, int32_t n);

// Queue reads behind all demand, in the given order; resident experts are skipped. Returns at once.
pyorch_status pyorch_prefetch(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// Bring in and never evict, until unpinned. PYORCH_BUDGET when the rest would fall below the floor.
pyorch_status pyorch_pin(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);
pyorch_status pyorch_unpin(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// The bytes of an expert, as the model's file has them, all matrices in the order of pyorch_layer_info.role. Copied.
// The next time it is to come into memory they are taken, and nothing is read. Ignored of one that is there, or on its
// way, and where experts are in a pack.
pyorch_status pyorch_offer(pyorch_engine * engine, int32_t il, int32_t expert, const void * bytes, uint64_t size);

// Free the memory of resident experts that are neither pinned nor in use.
pyorch_status pyorch_evict(pyorch_engine * engine, int32_t il, const int32_t * experts, int32_t n);

// Wait until no prediction is being made, and no read is queued or running. Decodes meanwhile what is to be decoded.
pyorch_status pyorch_wait_idle(pyorch_engine * engine);

// A counter is one line here, in the part that it belongs to, and the line that counts: Python and /metrics take names
// and sentences from this struct.
typedef struct pyorch_stats {
    // counters, of each layer too
    uint64_t hits;              // uses of experts that found them in memory
    uint64_t misses;            // uses of experts that had to wait for a read, or for the rest of one
    uint64_t loads;             // experts read
    uint64_t prefetch_loads;    // experts read ahead
    uint64_t prefetch_hits;     // experts that were read ahead and then used
    uint64_t prefetch_late;     // of these, those that had not wholly arrived
    uint64_t prefetch_wasted;   // experts read ahead, in part at least, on a guess that did not come true
    uint64_t evictions;         // experts that had to go for others
    uint64_t bytes_read;        // bytes of experts read
    uint64_t stall_ns;          // time in which at least one compute thread slept for an expert
    uint64_t compressed_hits;   // misses that found all parts of the compressed expert in memory: nothing was read;
                                // of a streamed layer, what passes its window counts neither here nor below
    uint64_t sm_hits;           // misses that found the expert's signs and mantissas in memory
    uint64_t e_hits;            // misses that found its exponents in memory
    uint64_t device_hits;       // uses that found the expert in the memory of the device: they are no hits above
    uint64_t device_misses;     // uses of all other experts
    uint64_t device_computed;   // uses that the device computed: hits, and what was uploaded for the layer at hand
    uint64_t device_loads;      // experts that came into slots of the device
    uint64_t device_evictions;  // experts of the device that had to go for others
    uint64_t device_bytes;      // bytes uploaded to the device, into slots and for prompts
    uint64_t device_ahead;      // experts that forecasts ordered to the device before their layer
    uint64_t device_ahead_hits; // of these, those that the layer used: they are hits of the device
    uint64_t device_ahead_late; // of these, those that the layer brought itself: nothing had come by then

    // gauges, of each layer too
    uint64_t resident_experts; // experts in memory
    uint64_t resident_bytes;   // bytes of the experts in memory
    uint64_t device_experts;   // experts in slots of the device

    // counters of the engine
    uint64_t read_ns;          // time with reads under way; of threads, the sum of their times
    uint64_t failures;         // decodes that failed
    uint64_t layer_passes;     // layers computed, of each ubatch
    uint64_t tokens;           // tokens routed, summed over layers
    uint64_t decoded_bytes;    // bytes of compressed experts, as kernels compute with them, that were recovered
    uint64_t decode_ns;        // time that recovering them took, summed over threads
    uint64_t device_upload_ns; // time that uploads took, summed over threads

    // gauges of the engine
    uint64_t stored_bytes;        // memory of parts of compressed experts that stay
    uint64_t used_bytes;          // memory that experts occupy
    uint64_t peak_bytes;          // the most memory that experts ever occupied
    uint64_t budget_bytes;        // memory that experts may occupy
    uint64_t device_used_bytes;   // memory of the device that slots, areas and rows of the processor occupy
    uint64_t device_budget_bytes; // memory of the device that they may occupy
} pyorch_stats;

// il -1: the whole engine.
pyorch_status pyorch_get_stats(pyorch_engine * engine, int32_t il, pyorch_stats * stats);

// All layers at one moment, in the order of il. Arrays are the caller's; n_expert: of the widest layer, rows of others
// end with zeros.
typedef struct pyorch_snapshot {
    int32_t        n_layers, n_expert;
    uint8_t *      flags;  // [n_layers][n_expert] PYORCH_RESIDENT and so on
    uint64_t *     uses;   // [n_layers][n_expert] hits and misses of each expert
    pyorch_stats * layers; // [n_layers] as pyorch_get_stats of one layer
    pyorch_stats   stats;  // of the whole engine
} pyorch_snapshot;

// Fills it in. flags NULL: the sizes and stats only.
pyorch_status pyorch_get_snapshot(pyorch_engine * engine, pyorch_snapshot * snapshot);

// counts[n]: how often each of the n experts of a layer was selected by its router for tokens of this engine's
// contexts, wherever it was computed, since the engine was made. n is n_expert.
pyorch_status pyorch_get_activations(pyorch_engine * engine, int32_t il, uint64_t * counts, int32_t n);

// Zero the counters (not the gauges).
pyorch_status pyorch_reset_stats(pyorch_engine * engine);

//
// prediction: reads ahead, lossless
//

// What predicts the experts of later layers while a layer of a decoding ubatch computes.
typedef enum pyorch_predictor {
    PYORCH_PREDICT_NONE         = 0,
    PYORCH_PREDICT_QUASI_HIDDEN = 1, // its router, applied to a guess of its input: see pyorch_set_default_vectors
    PYORCH_PREDICT_HYBRID       = 2, // the same, corrected by a trained network (pyorch_set_estimator) where the layer
                                     // is the next one, and pyorch_set_hybrid does not say otherwise
    PYORCH_PREDICT_EXPERT_MAP = 3,   // what the most alike iteration used in the layer: see pyorch_set_history
    PYORCH_PREDICT_ORACLE     = 4,   // in a replay: what the recording says, such as the truth
} pyorch_predictor;

// Sets what predicts one layer, il -1: every layer. distance: layers ahead at most, at least 1. min_precision: guesses
// that come true less often than this, as counted while running, are not read; 0 reads all. Below 0: those are read that
// gain more than they cost, as counted while running. automatic, of every layer: nonzero: only while experts are
// absent, unless a trial tells that decoding is sooner without, and into host memory only. PYORCH_INVALID where the predictor applies
// routers, automatic is 0, and a graph has a router that cannot be applied.
pyorch_status pyorch_set_prefetch(
    pyorch_engine * engine, int32_t il, int32_t predictor, int32_t distance, double min_precision, int32_t automatic);

// PYORCH_INVALID, with the layer and the reason, where a predictor that applies routers was chosen, or layers are
// speculated, and a graph has a router that cannot be applied. For when a context was made: before, no graph is known.
pyorch_status pyorch_check_routers(pyorch_engine * engine);

// How probabilities are made of a router's logits. The numbers are those of GGUF's expert_gating_func.
typedef enum pyorch_gating {
    PYORCH_GATING_SOFTMAX          = 1,
    PYORCH_GATING_SIGMOID          = 2,
    PYORCH_GATING_SOFTMAX_SELECTED = 3, // of the logits of the selected; they are selected by logits
    PYORCH_GATING_SQRT_SOFTPLUS    = 4,
} pyorch_gating;

// How a layer chooses its experts: logits = gate * input + bias, probabilities = gating(logits). Selected are the
// n_used with the highest probability + selection_bias, from the n_groups_used groups of experts in which the sum of
// the two highest is highest; n_groups 1: no groups. Their probabilities, divided by their sum if normalized, times
// scale, are the weights. Arrays may be NULL but for gate.
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

// The router as it is used. Arrays belong to the model that is loaded under the engine, or to the engine where
// pyorch_set_router gave it. PYORCH_INVALID where there is none: no context was made yet, or it cannot be applied.
pyorch_status pyorch_get_router(pyorch_engine * engine, int32_t il, pyorch_router * router);

// Mean outputs of the experts of a layer, [n_expert][n_embd], for quasi-hidden states (Speculating Experts, section 3).
// Copied, in 8 bits a value or 16.
pyorch_status pyorch_set_default_vectors(
    pyorch_engine * engine, int32_t il, const float * vectors, int32_t n_expert, int32_t n_embd);

// A network that corrects the logits which the router of the next layer gives for a quasi-hidden state (Speculating
// Experts, appendix A). n_layers: the first so many layers with experts have their states as its input.
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

// Copied, matrices in 8 bits a weight or 16. PYORCH_INVALID where it does not fit the layers of the model.
pyorch_status pyorch_set_estimator(pyorch_engine * engine, const pyorch_estimator * estimator);

// layers[n]: in the order of il, nonzero where hybrid takes the estimator to guess that layer, else quasi-hidden. Until
// it is called: all.
pyorch_status pyorch_set_hybrid(pyorch_engine * engine, const uint8_t * layers, int32_t n);

// While on, the outputs of all experts are summed up, for pyorch_get_mean_outputs. Turning it on begins anew.
pyorch_status pyorch_set_calibration(pyorch_engine * engine, int32_t on);

// vectors [n_expert][n_embd]: mean output of each expert since calibration began, 0 where it was never used;
// counts [n_expert]: how often it was.
pyorch_status pyorch_get_mean_outputs(
    pyorch_engine * engine, int32_t il, float * vectors, uint64_t * counts, int32_t n_expert, int32_t n_embd);

//
// speculation: lossy, off until set
//

// Layers compute with the experts and weights that were forecast for them one layer earlier, in place of their
// routers' choice, and read nothing else (Speculating Experts, section 4). The first layer keeps to its router, and
// so does one that nothing forecasts one layer ahead. Where pyorch_set_substitution treats absent experts, the router's
// choice stands: of it, what was forecast counts as there, and the rest is treated so.
typedef enum pyorch_speculate {
    PYORCH_SPECULATE_NONE   = 0,
    PYORCH_SPECULATE_DECODE = 1, // ubatches of one token of each sequence
    PYORCH_SPECULATE_ALL    = 2, // prompts too: shows what it costs in accuracy
} pyorch_speculate;

pyorch_status pyorch_set_speculation(pyorch_engine * engine, int32_t mode);

// Since pyorch_reset_stats. A slot is one of the n_expert_used of a token.
typedef struct pyorch_speculation_counts {
    uint64_t tokens; // of the ubatches concerned, counted in each layer
    uint64_t slots;  // that got a forecast expert
    uint64_t right;  // of them, those whose router chose the same
} pyorch_speculation_counts;

pyorch_status pyorch_get_speculation_counts(pyorch_engine * engine, pyorch_speculation_counts * counts);

//
// observers
//

// What a layer's router decided for one ubatch. Arrays are valid during the call, row-major by token.
typedef struct pyorch_routing {
    const void *    context; // tells contexts apart
    int32_t         il;
    int32_t         decode; // nonzero: one token of each sequence
    int32_t         n_tokens;
    int32_t         n_expert;
    int32_t         n_expert_used;
    int32_t         n_embd;    // of the hidden state
    const int32_t * experts;   // [n_tokens][n_expert_used]
    const float *   weights;   // [n_tokens][n_expert_used] as multiplied with the outputs
    const float *   probs;     // [n_tokens][n_expert] after gating
    const float *   logits;    // [n_tokens][n_expert] of the router
    const float *   inputs;    // [n_tokens][n_embd] of the router
    const float *   residuals; // [n_tokens][n_embd] of which the inputs are the RMS normalization, or NULL
} pyorch_routing;

// Called on a compute thread, between router and experts: it must return quickly.
typedef void (*pyorch_observer_fn)(void * user, const pyorch_routing * routing);

// One observer per engine; NULL removes it. On return no call of the old one is running.
pyorch_status pyorch_set_observer(pyorch_engine * engine, pyorch_observer_fn observer, void * user);

//
// history: expert maps of past iterations (FineMoE)
//

typedef struct pyorch_history pyorch_history;

// n_expert: of the widest layer; n_embd 0: without embeddings; capacity: in iterations; distance: of prefetching, for
// the redundancy score by which an iteration replaces another in a full store.
pyorch_status pyorch_history_new(
    int32_t n_layers, int32_t n_expert, int32_t n_embd, int32_t capacity, int32_t distance, pyorch_history ** history);
void pyorch_history_free(pyorch_history * history); // engines that have it keep it

// Predictors of the engine search it, and add what the engine decodes. NULL: they have none, and guess nothing.
pyorch_status pyorch_set_history(pyorch_engine * engine, pyorch_history * history);

// An iteration: embedding [n_embd], or NULL, and the distributions of its routers, map [n_layers][n_expert].
pyorch_status pyorch_history_add_map(pyorch_history * history, const float * embedding, const float * map);

pyorch_status pyorch_history_size(const pyorch_history * history, int32_t * n_maps);

// Copies embeddings [n_maps][n_embd] and maps [n_maps][n_layers][n_expert]; either may be NULL. n_maps: for how many
// there is room, then how many there are; a running engine adds more.
pyorch_status pyorch_history_export(
    const pyorch_history * history, float * embeddings, float * probs, int32_t * n_maps);

//
// substitution: lossy, off until set
//

typedef enum pyorch_substitute_mode {
    PYORCH_SUBSTITUTE_NONE    = 0,
    PYORCH_SUBSTITUTE_BUDDIES = 1, // from the lists of pyorch_set_buddies
    PYORCH_SUBSTITUTE_RANDOM  = 2, // any resident expert: the baseline
    PYORCH_SUBSTITUTE_CACHE   = 3, // the resident expert that the router ranks highest, with its own weight
} pyorch_substitute_mode;

typedef enum pyorch_substitute_order {
    PYORCH_ORDER_RANK   = 0, // as the router ranks them
    PYORCH_ORDER_WEIGHT = 1, // lowest weight first
} pyorch_substitute_order;

typedef enum pyorch_on_miss {
    PYORCH_MISS_FETCH = 0, // wait for what no substitute covers
    PYORCH_MISS_DROP  = 1, // leave it out
    PYORCH_MISS_GHOST = 2, // its ghost computes in its place; what has none is left out
} pyorch_on_miss;

// How a layer treats absent experts, by BuddyMoE's gates in their order. Each can be off.
// What others stand in for is read when nothing else is wanted, where eviction values it higher than what must go.
typedef struct pyorch_substitution {
    int32_t mode;          // pyorch_substitute_mode
    int32_t prefill;       // nonzero: also in ubatches with several tokens of a sequence
    int32_t max_per_token; // slots of a token in this layer that get another expert or lose theirs, 0: no limit
    int32_t order;         // pyorch_substitute_order: in which the absent experts of a token are treated
    int32_t on_miss;       // pyorch_on_miss, for what the gates allow but no buddy covers
    double  tau;           // none where the token activating entropy is at most this (below 0: off)
    double  temperature;   // of the probabilities that tau and gamma go by, 1: as they are
    double  gamma;         // none where the two largest probabilities differ by at least this (above 1: off)
    double  beta;          // none where at least this share of the requested experts is absent (above 1: off)
    double  read_budget;   // above 0: beta adapts, so that an ubatch waits for so many bytes of experts on average
    double  eta;           // of the router's logit in a buddy's priority, 0: it does not count
    double  kappa;         // of the hops to a buddy in its priority, 0 to 0.5: from what computes the layer (a device
                           // where there is one) to host memory, and to another server
    double   reuse;        // factor of a buddy's priority for each token of the ubatch that got it, 0 to 1
    uint64_t seed;         // of random substitution
    int32_t  sacred;       // so many of a token's experts, those of the highest weight, are never replaced nor left out
    int32_t  among;        // PYORCH_SUBSTITUTE_CACHE: only of so many that the router ranks highest, 0: of all
    double   bonus;        // PYORCH_SUBSTITUTE_CACHE: none whose logit is lower by more than this
    int32_t  max_all_layers; // as max_per_token, of all layers of a token together, in their order, 0: no limit
    double   max_weight; // none of this weight or more, as a multiple of what an expert of a token weighs on average:
                         // of all tokens and layers it was applied to since one was set (infinite: off)
} pyorch_substitution;

// Nothing is substituted, every gate is off, and what no buddy covers is fetched.
extern const pyorch_substitution pyorch_default_substitution;

pyorch_status pyorch_set_substitution(pyorch_engine * engine, int32_t il, const pyorch_substitution * substitution);

// ids: [n_expert][k_max], best first; -1 after the last. q: their similarities, of which priorities are made.
// PYORCH_INVALID for ids that do not exist.
pyorch_status pyorch_set_buddies(
    pyorch_engine * engine, int32_t il, int32_t n_expert, int32_t k_max, const int32_t * ids, const float * q);

// Counters of ubatches that substitution may touch. A slot is one of the n_expert_used of a token.
typedef struct pyorch_substitution_counts {
    // counters, of each layer too
    uint64_t tokens;
    uint64_t lossy_tokens; // of them, those that got another expert or lost one
    uint64_t substituted;  // slots that another expert stood in for
    uint64_t dropped;      // slots that were left out
    uint64_t refused_tae;  // absent slots, by the first gate that refused
    uint64_t refused_margin;
    uint64_t refused_distribution;
    uint64_t refused_rho;     // max_per_token or max_all_layers was reached
    uint64_t refused_buddies; // no buddy was resident and free
    uint64_t rank_sum;        // of the buddies used, in their lists
    uint64_t absent;          // experts that the ubatches asked for and that were absent
    uint64_t avoided;         // of them, those that nobody asked for any more
    uint64_t refused_sacred;  // absent slots among a token's heaviest, or as heavy as max_weight
    uint64_t ghosts;          // slots that ghosts computed
    uint64_t on_their_way;    // slots that were substituted, dropped or computed by ghosts while their expert was
                              // being read: a matter of time, unless the cache is simulated
} pyorch_substitution_counts;

// il -1: all layers. Zeroed by pyorch_reset_stats.
pyorch_status pyorch_get_substitution_counts(pyorch_engine * engine, int32_t il, pyorch_substitution_counts * counts);

// What stands in for absent experts of a layer: the mean output of each, and a linear map of low rank of the router's
// input x for what differs from it, y = mean + sum over its rows r of up[r] <down[r], x>. Rows are those of expert 0,
// then those of expert 1, and so on.
typedef struct pyorch_ghosts {
    int32_t         n_expert;
    int32_t         n_in;   // values of x
    int32_t         n_out;  // of y: of what the expert gives, before the router's weight
    int32_t         n_rows; // sum of the ranks
    const int32_t * rank;   // [n_expert], -1: no ghost
    const float *   mean;   // [n_expert][n_out]
    const float *   down;   // [n_rows][n_in]
    const float *   up;     // [n_rows][n_out]
} pyorch_ghosts;

// Copies them, with 8 bits for each number. PYORCH_INVALID for ghosts of other experts. They are used where
// pyorch_set_substitution says so.
pyorch_status pyorch_set_ghosts(pyorch_engine * engine, int32_t il, const pyorch_ghosts * ghosts);

#ifdef __cplusplus
}
#endif

#endif
