// What predicting costs beside decoding, at the shapes of real models: time by token, and memory.
//
//     prediction_bench [DIRECTORY]
//
// A token is taken to last as long as the kernel of Q4_0 needs, on all cores, for the weights that are active in it:
// nothing is read from a disk, and there is neither attention nor a barrier, so a real token takes longer. Between two
// layers so many weights are multiplied, so that predictors find the caches as decoding leaves them. Times are those of
// threads on their cores, medians of tokens. Weights are random. A small file is written to DIRECTORY (default: /tmp)
// and removed.

#include "random_weights.h"
#include "synthetic.h"

#include "banks/host_bank.h"
#include "base/cpu_backend.h"
#include "prediction/estimator.h"
#include "prediction/prefetch_planner.h"
#include "residency/table.h"

#include <algorithm>
#include <atomic>
#include <ctime>
#include <thread>

using namespace pyorch;

struct Shape {
    const char * name;
    int          n_layers, n_expert, n_used, n_embd;
    double       active_bytes, model_bytes; // in Q4_K_M, 4.85 bits a weight
};

static constexpr Shape SHAPES[] = {
    { "Qwen3-30B-A3B", 48, 128, 8, 2048, 3.3e9 * 4.85 / 8, 30.5e9 * 4.85 / 8 },
    { "DeepSeek-V3", 58, 256, 8, 7168, 37e9 * 4.85 / 8, 671e9 * 4.85 / 8 },
};

static constexpr int N_LATENT = 128, N_HIDDEN = 512; // as pyorch train-predictor has them by default

// Of this thread, on its core: what else runs on the machine does not count.
static double seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double) now.tv_sec + 1e-9 * (double) now.tv_nsec;
}

static double median(std::vector<double> & times) {
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

// Of this process, in memory.
static double resident_bytes() {
    long   pages = 0, resident = 0;
    FILE * file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &pages, &resident) != 2) {
        resident = 0;
    }
    if (file) {
        fclose(file);
    }
    return (double) resident * (double) sysconf(_SC_PAGESIZE);
}

// Stands in for the compute threads: multiplies weights on all cores, too many of them for any cache.
class Weights {
public:
    Weights() : rows(N_ROWS * ROW_BYTES), input(ggml_row_size(GGML_TYPE_Q8_0, N_COLUMNS)) {
        const std::vector<float> values = random_weights(N_COLUMNS, 1);
        cpu_backend().type_traits(GGML_TYPE_Q8_0)->from_float(values.data(), input.data(), N_COLUMNS);
        cpu_backend().type_traits(GGML_TYPE_Q4_0)->from_float(values.data(), rows.data(), N_COLUMNS);
        for (size_t r = 1; r < N_ROWS; ++r) {
            std::copy_n(rows.data(), ROW_BYTES, &rows[r * ROW_BYTES]);
        }
    }

    // Seconds for so many bytes.
    double multiply(double bytes) {
        const size_t             n      = std::max(1u, std::thread::hardware_concurrency());
        const size_t             n_rows = (size_t) (bytes / ROW_BYTES) / n;
        std::vector<double>      times(n);
        std::vector<std::thread> threads;
        for (size_t i = 0; i < n; ++i) {
            threads.emplace_back([=, &times] {
                const double begin = seconds();
                multiply_rows(n_rows, next + N_ROWS / n * i);
                times[i] = seconds() - begin;
            });
        }
        for (std::thread & thread : threads) {
            thread.join();
        }
        next += n_rows;
        return *std::max_element(times.begin(), times.end());
    }

private:
    static constexpr size_t N_COLUMNS = 2048, N_ROWS = 1u << 18, ROW_BYTES = N_COLUMNS / 32 * 18; // 302 MB

    std::vector<uint8_t> rows, input;
    size_t               next = 0;
    std::atomic<float>   sum{ 0 }; // what is multiplied is used

    void multiply_rows(size_t n, size_t from) {
        const auto dot = cpu_backend().type_traits(GGML_TYPE_Q4_0)->vec_dot;
        float      own = 0;
        for (size_t r = 0; r < n; ++r) {
            float product;
            dot(N_COLUMNS, &product, 0, &rows[(from + r) % N_ROWS * ROW_BYTES], 0, input.data(), 0, 1);
            own += product;
        }
        sum = own;
    }
};

static std::shared_ptr<const Estimator> random_estimator(const Shape & shape) {
    const size_t n_layers  = shape.n_layers - 1;
    const auto   in_weight = random_weights((size_t) N_LATENT * shape.n_embd, 0.02f),
                 in_bias   = random_weights(N_LATENT, 1);
    const auto   position  = random_weights(n_layers * N_LATENT, 0.5f);
    const auto   up_weight = random_weights((size_t) N_HIDDEN * N_LATENT, 0.06f), up_bias = random_weights(N_HIDDEN, 1);
    const auto   down_weight = random_weights((size_t) N_LATENT * N_HIDDEN, 0.03f),
                 down_bias   = random_weights(N_LATENT, 1);
    const auto   norm_weight = random_weights(N_LATENT, 1), norm_bias = random_weights(N_LATENT, 1);
    const auto   head_weight = random_weights(n_layers * shape.n_expert * N_LATENT, 0.01f);
    const auto   head_bias   = random_weights(n_layers * shape.n_expert, 0.1f);
    pyorch_estimator e       = {};
    e.n_embd                 = shape.n_embd;
    e.n_latent               = N_LATENT;
    e.n_hidden               = N_HIDDEN;
    e.n_layers               = (int) n_layers;
    e.n_expert               = shape.n_expert;
    e.in_weight              = in_weight.data();
    e.in_bias                = in_bias.data();
    e.position               = position.data();
    e.up_weight              = up_weight.data();
    e.up_bias                = up_bias.data();
    e.down_weight            = down_weight.data();
    e.down_bias              = down_bias.data();
    e.norm_weight            = norm_weight.data();
    e.norm_bias              = norm_bias.data();
    e.head_weight            = head_weight.data();
    e.head_bias              = head_bias.data();
    return std::make_shared<const Estimator>(e);
}

struct Times {
    double predicted, computed; // seconds
};

static Times predict_token(PrefetchPlanner & planner, RoutedLayer & routed, const Shape & shape, Weights & weights) {
    Times times = {};
    planner.begin(&shape, { true, 1, {} });
    for (int layer = 0; layer < shape.n_layers; ++layer) {
        times.computed += weights.multiply(shape.active_bytes / shape.n_layers);
        routed.layer       = layer;
        const double begin = seconds();
        planner.routed(&shape, routed);
        times.predicted += seconds() - begin;
    }
    return times;
}

static void measure(const std::string & path, const Shape & shape, int n_tokens) {
    const ModelMap map    = synthetic_map(path, shape.n_layers, shape.n_expert, [](int) { return 2; });
    pyorch_config  config = {};
    config.policy         = PYORCH_FINEMOE;
    Table table(map, std::make_unique<HostBank>(map, map.slots_bytes() / 2), call_source(touch_pages, nullptr),
        plain_codec(), config);

    // The graph has routers of its own: one that all layers share does here.
    const std::vector<float> gate = random_weights((size_t) shape.n_expert * shape.n_embd, 0.02f),
                             norm(shape.n_embd, 1);
    Routers                  routers(shape.n_layers);
    for (int layer = 0; layer < shape.n_layers; ++layer) {
        Router router;
        router.gate       = gate.data();
        router.norm       = norm.data();
        router.eps        = 1e-6f;
        router.normalized = true;
        router.n_embd     = shape.n_embd;
        router.n_expert   = shape.n_expert;
        router.n_used     = shape.n_used;
        routers.set(layer, router, &shape);
    }
    RoutedLayer routed;
    routed.n_tokens = 1;
    routed.n_used   = shape.n_used;
    routed.decode   = true;
    for (int e = 0; e < shape.n_used; ++e) {
        routed.experts.push_back(e * (shape.n_expert / shape.n_used));
        routed.weights.push_back(1.0f / shape.n_used);
    }
    routed.computed  = routed.experts;
    routed.residuals = random_weights(shape.n_embd, 1);

    Weights weights;
    for (pyorch_predictor kind : { PYORCH_PREDICT_QUASI_HIDDEN, PYORCH_PREDICT_HYBRID }) {
        for (int distance : { 1, 2 }) {
            const double    before = resident_bytes();
            PrefetchPlanner planner(table, routers);
            for (int layer = 0; layer < shape.n_layers; ++layer) {
                planner.set(layer, { kind, distance, 0.6 });
            }
            {
                const std::vector<float> vectors = random_weights((size_t) shape.n_expert * shape.n_embd, 0.1f);
                for (int layer = 0; layer < shape.n_layers; ++layer) {
                    planner.change_model().defaults[layer] =
                        std::make_shared<const CompactMatrix>(vectors.data(), shape.n_expert, shape.n_embd);
                }
            }
            if (kind == PYORCH_PREDICT_HYBRID) {
                planner.change_model().estimator = random_estimator(shape);
                planner.change_model().estimated.assign(shape.n_layers, 1);
            }
            predict_token(planner, routed, shape, weights); // copies are made
            const double held = resident_bytes() - before;
            printf("%-14s %3d x %3d, n_embd %4d, %-13s %d ahead: %3.0f MB, %.2f %% of the model\n", shape.name,
                shape.n_layers, shape.n_expert, shape.n_embd,
                kind == PYORCH_PREDICT_HYBRID ? "hybrid," : "quasi-hidden,", distance, held / 1e6,
                100 * held / shape.model_bytes);
            std::vector<double> predicting, token;
            for (int t = 0; t < n_tokens; ++t) {
                const Times times = predict_token(planner, routed, shape, weights);
                predicting.push_back(times.predicted);
                token.push_back(times.computed);
            }
            const double predicted = median(predicting), computed = median(token);
            printf("    %6.2f ms of %6.1f ms a token, %4.1f %%\n", 1e3 * predicted, 1e3 * computed,
                100 * predicted / computed);
            fflush(stdout);
        }
    }
}

int main(int argc, char ** argv) {
    const std::string directory = argc > 1 ? argv[1] : "/tmp";
    const std::string path      = directory + "/prediction_bench." + std::to_string(getpid()) + ".gguf";
    for (const Shape & shape : SHAPES) {
        measure(path, shape, shape.n_expert > 128 ? 4 : 40);
    }
    return 0;
}
