/* The C API as a C99 program sees it, by nothing but its headers: c_api MODEL.gguf
 *
 * Exits with 1, and says why, at the first promise of the headers that the library does not keep. The model has routed
 * experts, in all of its layers the same number.
 */

#include "pyorch.h"
#include "pyorch-cluster.h"
#include "pyorch-devices.h"
#include "pyorch-replay.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition) check((condition), #condition, __LINE__)
#define OK(call) ok((call), #call, __LINE__)
#define REFUSED(status, word, call) refused((status), (word), (call), #call, __LINE__)

static void check(int condition, const char * text, int line) {
    if (!condition) {
        fprintf(stderr, "line %d: not so: %s\n", line, text);
        exit(1);
    }
}

static void ok(pyorch_status status, const char * text, int line) {
    if (status != PYORCH_OK) {
        fprintf(stderr, "line %d: %s: status %d: %s\n", line, text, (int) status, pyorch_last_error());
        exit(1);
    }
}

static void refused(pyorch_status expected, const char * word, pyorch_status status, const char * text, int line) {
    if (status != expected || strstr(pyorch_last_error(), word) == NULL) {
        fprintf(stderr, "line %d: %s: status %d, not %d with \"%s\": %s\n", line, text, (int) status, (int) expected,
            word, pyorch_last_error());
        exit(1);
    }
}

/*
 * library
 */

static void test_the_library_says_what_it_is(void) {
    CHECK(strchr(pyorch_version(), '.') != NULL);
    CHECK(pyorch_abi() == PYORCH_ABI);
}

static void test_choices_are_listed_in_the_order_of_their_values(void) {
    const int lasts[] = {
        PYORCH_MARKING,
        PYORCH_PREDICT_ORACLE,
        PYORCH_SPECULATE_ALL,
        PYORCH_SUBSTITUTE_CACHE,
        PYORCH_ORDER_WEIGHT,
        PYORCH_MISS_GHOST,
        PYORCH_GATING_SQRT_SOFTPLUS,
    };
    for (int32_t list = PYORCH_CHOICES_POLICY; list <= PYORCH_CHOICES_GATING; ++list) {
        const int32_t first = list == PYORCH_CHOICES_GATING ? PYORCH_GATING_SOFTMAX : 0;
        for (int32_t i = 0; i <= lasts[list] - first; ++i) {
            const pyorch_choice * choice = pyorch_get_choice(list, i);
            CHECK(choice->value == first + i && choice->name[0] != '\0' && choice->description[0] != '\0');
            printf("%d %s %u %u %d\n", (int) list, choice->name, (unsigned) choice->needs, (unsigned) choice->uses,
                (int) choice->executable);
        }
        CHECK(pyorch_get_choice(list, lasts[list] - first + 1) == NULL);
    }
    CHECK(pyorch_get_choice(PYORCH_CHOICES_GATING + 1, 0) == NULL);
}

/*
 * engine
 */

static void test_an_engine_with_default_settings_reads_what_it_is_told(const pyorch_model_map * map, int32_t il) {
    pyorch_config   config = pyorch_default_config;
    pyorch_engine * engine;
    OK(pyorch_engine_new(map, &config, &engine));
    const int32_t experts[] = { 3, 1 };
    OK(pyorch_prefetch(engine, il, experts, 2));
    OK(pyorch_wait_idle(engine));
    pyorch_stats stats;
    OK(pyorch_get_stats(engine, -1, &stats));
    CHECK(stats.loads == 2 && stats.resident_experts == 2 && stats.bytes_read > 0 && stats.failures == 0);
    CHECK(pyorch_engine_error(engine)[0] == '\0');
    CHECK(pyorch_decode_error()[0] == '\0');
    OK(pyorch_engine_free(engine));
}

static void test_substitution_is_off_by_default(const pyorch_model_map * map, int32_t il) {
    pyorch_config   config = pyorch_default_config;
    pyorch_engine * engine;
    OK(pyorch_engine_new(map, &config, &engine));
    pyorch_substitution substitution = pyorch_default_substitution;
    CHECK(substitution.mode == PYORCH_SUBSTITUTE_NONE && substitution.on_miss == PYORCH_MISS_FETCH);
    OK(pyorch_set_substitution(engine, il, &substitution));
    substitution.bonus = -1;
    REFUSED(PYORCH_INVALID, "negative", pyorch_set_substitution(engine, il, &substitution));
    OK(pyorch_engine_free(engine));
}

/*
 * callbacks
 */

typedef struct calls {
    const pyorch_model_map * map;
    pyorch_engine *          engine;
    pyorch_history *         history;
    int32_t                  il, n_expert, n_layers;
    int                      n; /* of callbacks */
} calls;

/* Every function of an engine, called inside a callback: those that might wait are refused, the others work. */
static void make_calls(calls * c) {
    pyorch_engine *            engine = c->engine;
    pyorch_engine *            other;
    const int32_t              expert = 0;
    float                      value  = 0;
    uint8_t                    mask[4096];
    const pyorch_config        config       = pyorch_default_config;
    const pyorch_substitution  substitution = pyorch_default_substitution;
    const pyorch_replay_config replay       = pyorch_default_replay_config;
    pyorch_router              router;
    pyorch_estimator           estimator;
    pyorch_recording           recording;
    pyorch_replay_result       result;
    pyorch_stats               stats;
    pyorch_speculation_counts  speculated;
    pyorch_substitution_counts substituted;
    pyorch_model_map_info      info;
    memset(&router, 0, sizeof(router));
    memset(&estimator, 0, sizeof(estimator));
    memset(&recording, 0, sizeof(recording));
    memset(mask, 1, sizeof(mask));

#define FORBIDDEN(function, arguments)                                                                                 \
    REFUSED(PYORCH_CALLBACK, #function " cannot be called inside a callback", function arguments)
    FORBIDDEN(pyorch_engine_new, (c->map, &config, &other));
    FORBIDDEN(pyorch_simulation_new, (c->map, &config, &other));
    FORBIDDEN(pyorch_engine_free, (engine));
    FORBIDDEN(pyorch_engine_capture, (NULL));
    FORBIDDEN(pyorch_set_budget, (engine, UINT64_MAX));
    FORBIDDEN(pyorch_set_policy, (engine, PYORCH_LRU));
    FORBIDDEN(pyorch_set_layer_limits, (engine, c->il, 0, c->n_expert));
    FORBIDDEN(pyorch_set_device_budget, (engine, 0, 0));
    FORBIDDEN(pyorch_set_device_limits, (engine, c->il, 0, c->n_expert));
    FORBIDDEN(pyorch_stop_listening, (engine));
    FORBIDDEN(pyorch_disconnect, (engine, 0));
    FORBIDDEN(pyorch_wait_idle, (engine));
    FORBIDDEN(pyorch_reset_stats, (engine));
    FORBIDDEN(pyorch_set_prefetch, (engine, -1, PYORCH_PREDICT_NONE, 1, 0, 0));
    FORBIDDEN(pyorch_set_router, (engine, c->il, &router));
    FORBIDDEN(pyorch_check_routers, (engine));
    FORBIDDEN(pyorch_set_default_vectors, (engine, c->il, &value, c->n_expert, 0));
    FORBIDDEN(pyorch_set_estimator, (engine, &estimator));
    FORBIDDEN(pyorch_set_hybrid, (engine, mask, c->n_layers));
    FORBIDDEN(pyorch_set_calibration, (engine, 0));
    FORBIDDEN(pyorch_set_speculation, (engine, PYORCH_SPECULATE_NONE));
    FORBIDDEN(pyorch_set_observer, (engine, NULL, NULL));
    FORBIDDEN(pyorch_set_history, (engine, NULL));
    FORBIDDEN(pyorch_set_substitution, (engine, c->il, &substitution));
    FORBIDDEN(pyorch_set_buddies, (engine, c->il, c->n_expert, 1, &expert, &value));
    FORBIDDEN(pyorch_set_cache, (engine, c->il, NULL, 0));
    FORBIDDEN(pyorch_replay, (engine, &recording, &replay, &result, 0, 0, NULL, NULL, NULL));
#undef FORBIDDEN

    OK(pyorch_get_residency(engine, c->il, mask, c->n_expert));
    OK(pyorch_get_stats(engine, c->il, &stats));
    OK(pyorch_get_speculation_counts(engine, &speculated));
    OK(pyorch_get_substitution_counts(engine, -1, &substituted));
    CHECK(pyorch_engine_error(engine) != NULL);
    OK(pyorch_prefetch(engine, c->il, &expert, 1));
    OK(pyorch_pin(engine, c->il, &expert, 1));
    OK(pyorch_unpin(engine, c->il, &expert, 1));
    OK(pyorch_evict(engine, c->il, &expert, 1));
    OK(pyorch_model_map_get_info(c->map, &info));
    int32_t n_maps;
    OK(pyorch_history_size(c->history, &n_maps));
    ++c->n;
}

static int64_t read_nothing(void * user, int32_t file, uint64_t offset, void * buf, uint64_t size) {
    calls * c = user;
    (void) file;
    (void) offset;
    if (c->n == 0) { /* one reader: nobody else counts */
        make_calls(c);
    }
    memset(buf, 0, (size_t) size);
    return (int64_t) size;
}

static void test_a_read_callback_is_refused_what_would_wait_for_it(calls c) {
    const int32_t expert = 1;
    pyorch_config config = pyorch_default_config;
    config.read          = read_nothing;
    config.read_user     = &c;
    config.read_depth    = 1;
    OK(pyorch_engine_new(c.map, &config, &c.engine));
    OK(pyorch_prefetch(c.engine, c.il, &expert, 1));
    OK(pyorch_wait_idle(c.engine));
    CHECK(c.n == 1);
    OK(pyorch_engine_free(c.engine));
}

/*
 * replay
 */

enum { N_TOKENS = 3, N_USED = 2 };

static pyorch_recording tiny_recording(const pyorch_model_map_info * info, int32_t n_expert) {
    static uint16_t       experts[N_TOKENS * 4096 * N_USED];
    static float          weights[N_TOKENS * 4096 * N_USED];
    static const uint32_t request[N_TOKENS]   = { 0, 0, 0 };
    static const int64_t  begin[N_TOKENS + 1] = { 0, 1, 2, 3 };
    static const int64_t  order[N_TOKENS]     = { 0, 1, 2 };
    static const uint8_t  decode[N_TOKENS]    = { 1, 1, 1 };
    const int32_t         n                   = info->n_moe_layers;
    for (int32_t i = 0; i < N_TOKENS * n * N_USED; ++i) {
        experts[i] = (uint16_t) (i % n_expert);
        weights[i] = 0.5f;
    }
    pyorch_recording recording;
    memset(&recording, 0, sizeof(recording));
    recording.n_tokens   = N_TOKENS;
    recording.n_layers   = n;
    recording.n_expert   = n_expert;
    recording.n_used     = N_USED;
    recording.experts    = experts;
    recording.weights    = weights;
    recording.request    = request;
    recording.n_ubatches = N_TOKENS;
    recording.begin      = begin;
    recording.order      = order;
    recording.decode     = decode;
    return recording;
}

static void test_a_tiny_recording_is_replayed(calls c, const pyorch_model_map_info * info) {
    pyorch_config config = pyorch_default_config;
    config.policy        = PYORCH_BELADY;
    OK(pyorch_simulation_new(c.map, &config, &c.engine));
    OK(pyorch_set_prefetch(c.engine, -1, PYORCH_PREDICT_ORACLE, 1, 0, 0));
    pyorch_recording recording = tiny_recording(info, c.n_expert);
    /* of the last layer of the last token */
    static int16_t forecasts[N_TOKENS * 64] = { 0 };
    for (int i = 0; i < N_TOKENS * info->n_moe_layers - 1; ++i) {
        forecasts[i] = -1;
    }
    recording.forecasts   = forecasts;
    recording.n_distances = recording.n_forecast = 1;
    pyorch_replay_result result;
    OK(pyorch_replay(c.engine, &recording, &pyorch_default_replay_config, &result, 0, 0, NULL, NULL, NULL));
    CHECK(result.n_tokens == N_TOKENS && result.n_decoded == N_TOKENS && result.seconds > 0);
    pyorch_stats stats;
    OK(pyorch_get_stats(c.engine, -1, &stats));
    CHECK(stats.hits + stats.misses == (uint64_t) (N_TOKENS * info->n_moe_layers * N_USED));
    OK(pyorch_engine_free(c.engine));

    REFUSED(PYORCH_INVALID, "future", pyorch_engine_new(c.map, &config, &c.engine));
    config.policy = PYORCH_LRU;
    OK(pyorch_engine_new(c.map, &config, &c.engine));
    REFUSED(PYORCH_INVALID, "compared", pyorch_set_policy(c.engine, PYORCH_FIFO));
    REFUSED(PYORCH_INVALID, "future", pyorch_set_prefetch(c.engine, -1, PYORCH_PREDICT_ORACLE, 1, 0, 0));
    OK(pyorch_engine_free(c.engine));
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: c_api MODEL.gguf\n");
        return 2;
    }
    pyorch_model_map * map;
    REFUSED(PYORCH_IO, "nowhere.gguf", pyorch_model_map_open("nowhere.gguf", &map));
    OK(pyorch_model_map_open(argv[1], &map));
    pyorch_model_map_info info;
    OK(pyorch_model_map_get_info(map, &info));
    pyorch_layer_info layer;
    OK(pyorch_model_map_get_layer(map, 0, &layer));
    CHECK(info.n_moe_layers > 0 && info.n_moe_layers <= 4096 && layer.n_expert >= 4 && layer.n_expert <= 4096);
    pyorch_history * history;
    OK(pyorch_history_new(info.n_moe_layers, layer.n_expert, 0, 10, 1, &history));

    const calls c = { map, NULL, history, layer.il, layer.n_expert, info.n_moe_layers, 0 };
    test_the_library_says_what_it_is();
    test_choices_are_listed_in_the_order_of_their_values();
    test_an_engine_with_default_settings_reads_what_it_is_told(map, layer.il);
    test_substitution_is_off_by_default(map, layer.il);
    test_a_read_callback_is_refused_what_would_wait_for_it(c);
    test_a_tiny_recording_is_replayed(c, &info);
    pyorch_history_free(history);
    pyorch_model_map_free(map);
    return 0;
}
