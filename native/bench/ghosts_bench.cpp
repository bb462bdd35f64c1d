// What ghosts cost, at the shapes of real models: the node of the graph that computes those that are asked for, beside
// what ggml's own operations would take for the same.
//
//     ghosts_bench [THREADS] [ROUNDS]
//
// All of them have the same rank here, which is where ggml's operations do best:
//     dense    the ghosts of all experts of the layer for every token, two products of matrices, a mask between them
//     chosen   mul_mat_id with those that are asked for, which needs one rank for all
// Ghosts are read from memory: several layers take turns, so that no cache has them. Times are medians of rounds by
// turns.

#include "random_weights.h"

#include "base/cpu_backend.h"
#include "routing/ghosts.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>

using namespace pyorch;

struct Shape {
    const char * name;
    int          n_expert, n_embd, rank;
};

// Ranks: what 3 % of the experts' bytes in Q4_K_M have room for. Those of mul_mat_id are whole blocks of 32.
static constexpr Shape SHAPES[] = {
    { "4 GiB model of docs/measurements/lossy.md", 64, 2048, 24 },
    { "Qwen3-30B-A3B", 128, 2048, 20 },
    { "Mixtral-8x7B", 8, 4096, 64 },
};

struct Load {
    const char * name;
    int          n_tokens, n_ghosts; // of a token
};

static constexpr Load LOADS[] = { { "one token, 1 ghost", 1, 1 }, { "one token, 3 ghosts", 1, 3 },
    { "prompt of 64", 64, 3 }, { "prompt of 512", 512, 3 } };

static constexpr size_t LEAST_BYTES = 256u << 20; // of the layers that take turns, more than caches hold

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One layer, in the forms of all three ways.
struct Layer {
    std::unique_ptr<GhostLayer> ghosts;
    ggml_tensor *               down, *up, *mean; // dense: [n_in, rows], [rows, n_out], [n_expert, n_out]
    ggml_tensor *               down_by_id, *up_by_id,
        *mean_by_id; // [n_in, rank, n_expert], [rank, n_out, n_expert], [n_out, n_expert]
};

class Bench {
public:
    Bench(const Shape & shape, int n_threads) : s(shape), n_threads(n_threads), rank_by_id((s.rank + 31) / 32 * 32) {
        const size_t each = (size_t) s.n_expert * s.rank * s.n_embd * 2;
        n_layers          = (int) std::max<size_t>(1, LEAST_BYTES / each);
        backend           = ggml_backend_dev_init(cpu_backend().device, nullptr);
        cpu_backend().set_n_threads(backend, n_threads);
        ggml_init_params params = { ggml_tensor_overhead() * (8 * n_layers + 16), nullptr, true };
        ctx                     = ggml_init(params);
        layers.resize(n_layers);
        for (Layer & l : layers) {
            const int n_rows = s.n_expert * s.rank;
            l.down           = ggml_new_tensor_2d(ctx, GGML_TYPE_Q8_0, s.n_embd, n_rows);
            l.up             = ggml_new_tensor_2d(ctx, GGML_TYPE_Q8_0, n_rows, s.n_embd);
            l.mean           = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, s.n_expert, s.n_embd);
            l.down_by_id     = ggml_new_tensor_3d(ctx, GGML_TYPE_Q8_0, s.n_embd, rank_by_id, s.n_expert);
            l.up_by_id       = ggml_new_tensor_3d(ctx, GGML_TYPE_Q8_0, rank_by_id, s.n_embd, s.n_expert);
            l.mean_by_id     = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.n_embd, s.n_expert);
        }
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        if (!buffer) {
            fprintf(stderr, "there is no memory for ghosts of %s\n", s.name);
            exit(1);
        }
        const std::vector<float> rows = random_weights((size_t) s.n_expert * rank_by_id * s.n_embd, 0.1f);
        const std::vector<int>   ranks(s.n_expert, s.rank);
        pyorch_ghosts            given = {};
        given.n_expert                 = s.n_expert;
        given.n_in = given.n_out = s.n_embd;
        given.n_rows             = s.n_expert * s.rank;
        given.rank               = ranks.data();
        given.mean = given.down = given.up = rows.data();
        for (Layer & l : layers) {
            l.ghosts = std::make_unique<GhostLayer>(given);
            for (ggml_tensor * t : { l.down, l.up, l.mean, l.down_by_id, l.up_by_id, l.mean_by_id }) {
                fill(t, rows.data());
            }
        }
    }

    ~Bench() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
        ggml_backend_free(backend);
    }

    int layers_in_turn() const { return n_layers; }

    // Microseconds for each ghost of a token: of the node, dense, chosen.
    std::vector<double> measure(const Load & load, int n_rounds) {
        std::vector<std::vector<double>> times(3);
        std::vector<Graph>               graphs;
        for (int way = 0; way < 3; ++way) {
            graphs.emplace_back(*this, load, way);
        }
        for (int round = -1; round < n_rounds; ++round) {
            for (int i = 0; i < 3; ++i) {
                const int    way   = round % 2 ? 2 - i : i;
                const double begin = seconds();
                graphs[way].compute(load.n_tokens == 1 ? 32 : 1);
                if (round >= 0) {
                    times[way].push_back((seconds() - begin) / (load.n_tokens == 1 ? 32 : 1));
                }
            }
        }
        std::vector<double> medians;
        for (auto & of_way : times) {
            std::nth_element(of_way.begin(), of_way.begin() + of_way.size() / 2, of_way.end());
            medians.push_back(1e6 * of_way[of_way.size() / 2] / (load.n_tokens * load.n_ghosts));
        }
        return medians;
    }

private:
    // The graphs of one way, one for each layer.
    class Graph {
    public:
        Graph(Bench & bench, const Load & load, int way) : bench(bench) {
            ggml_init_params params = { (size_t) bench.n_layers *
                        (ggml_tensor_overhead() * 24 + ggml_graph_overhead_custom(32, false)) +
                    ggml_tensor_overhead() * 16,
                nullptr, true };
            ctx.reset(ggml_init(params));
            const Shape & s     = bench.s;
            const int     slots = load.n_tokens * load.n_ghosts;
            ggml_tensor * x     = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, s.n_embd, 1, load.n_tokens);
            ggml_tensor * ids   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, load.n_ghosts, load.n_tokens);
            ggml_tensor * mask  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, s.n_expert * s.rank, load.n_tokens);
            ggml_tensor * gates = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, s.n_expert, load.n_tokens);
            buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), bench.backend));
            const std::vector<float> inputs = random_weights((size_t) s.n_embd * load.n_tokens, 1);
            memcpy(x->data, inputs.data(), ggml_nbytes(x));
            memset(mask->data, 0, ggml_nbytes(mask));
            memset(gates->data, 0, ggml_nbytes(gates));
            std::vector<int32_t> experts(slots);
            for (int i = 0; i < slots; ++i) {
                const int expert = experts[i] = (i / load.n_ghosts * 5 + i % load.n_ghosts * 7) % s.n_expert;
                float *   of_token = (float *) mask->data + (size_t) (i / load.n_ghosts) * s.n_expert * s.rank;
                std::fill_n(of_token + expert * s.rank, s.rank, 0.1f);
                ((float *) gates->data)[i / load.n_ghosts * s.n_expert + expert] = 0.1f;
            }
            memcpy(ids->data, experts.data(), ggml_nbytes(ids));
            std::vector<int> all(slots);
            std::iota(all.begin(), all.end(), 0);
            jobs.resize(bench.n_layers);
            for (int i = 0; i < bench.n_layers; ++i) {
                Layer &       l = bench.layers[i];
                ggml_tensor * y;
                if (way == 0) {
                    jobs[i] = { l.ghosts.get(), ghost_jobs(*l.ghosts, experts.data(), all), load.n_ghosts };
                    ggml_tensor * args[] = { x };
                    y = ggml_custom_4d(ctx.get(), GGML_TYPE_F32, s.n_embd, load.n_ghosts, load.n_tokens, 1, args, 1,
                        node, GGML_N_TASKS_MAX, &jobs[i]);
                } else if (way == 1) {
                    ggml_tensor * flat = ggml_reshape_2d(ctx.get(), x, s.n_embd, load.n_tokens);
                    y                  = ggml_mul(ctx.get(), ggml_mul_mat(ctx.get(), l.down, flat), mask);
                    y = ggml_add(ctx.get(), ggml_mul_mat(ctx.get(), l.up, y), ggml_mul_mat(ctx.get(), l.mean, gates));
                } else {
                    y                  = ggml_mul_mat_id(ctx.get(), l.down_by_id, x, ids);
                    y                  = ggml_mul_mat_id(ctx.get(), l.up_by_id, y, ids);
                    ggml_tensor * flat = ggml_reshape_1d(ctx.get(), ids, slots);
                    ggml_tensor * mean = ggml_get_rows(ctx.get(), l.mean_by_id, flat);
                    y                  = ggml_add(
                        ctx.get(), y, ggml_reshape_3d(ctx.get(), mean, s.n_embd, load.n_ghosts, load.n_tokens));
                }
                ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 32, false);
                ggml_build_forward_expand(graph, y);
                graphs.push_back(graph);
                memory.emplace_back(ggml_gallocr_new(ggml_backend_get_default_buffer_type(bench.backend)));
                ggml_gallocr_alloc_graph(memory.back().get(), graph);
            }
        }

        // Of the layers that come next.
        void compute(int n) {
            for (; n > 0; --n, next = (next + 1) % bench.n_layers) {
                if (ggml_backend_graph_compute(bench.backend, graphs[next]) != GGML_STATUS_SUCCESS) {
                    fprintf(stderr, "a graph failed\n");
                    exit(1);
                }
            }
        }

    private:
        struct Jobs {
            const GhostLayer *    layer = nullptr;
            std::vector<GhostJob> jobs;
            int                   n_ghosts = 0;
        };

        struct Free {
            void operator()(ggml_context * c) const { ggml_free(c); }
            void operator()(ggml_backend_buffer * b) const { ggml_backend_buffer_free(b); }
            void operator()(ggml_gallocr * a) const { ggml_gallocr_free(a); }
        };

        Bench &                                          bench;
        std::unique_ptr<ggml_context, Free>              ctx;
        std::unique_ptr<ggml_backend_buffer, Free>       buffer;
        std::vector<std::unique_ptr<ggml_gallocr, Free>> memory;
        std::vector<ggml_cgraph *>                       graphs;
        std::vector<Jobs>                                jobs;
        int                                              next = 0;

        // As ghosts_op of native/src/routing/graph.cpp.
        static void node(ggml_tensor * y, int ith, int nth, void * user) {
            const Jobs &               j = *(const Jobs *) user;
            std::vector<const float *> from;
            std::vector<float *>       to;
            for (size_t i = ith; i < j.jobs.size(); i += nth) {
                from.clear();
                to.clear();
                for (int slot : j.jobs[i].slots) {
                    from.push_back((const float *) y->src[0]->data + (size_t) (slot / j.n_ghosts) * y->ne[0]);
                    to.push_back((float *) y->data + (size_t) slot * y->ne[0]);
                }
                j.layer->compute(j.jobs[i].expert, from, to);
            }
        }
    };

    const Shape           s;
    const int             n_threads, rank_by_id;
    int                   n_layers;
    ggml_backend_t        backend;
    ggml_context *        ctx;
    ggml_backend_buffer_t buffer;
    std::vector<Layer>    layers;

    static void fill(ggml_tensor * t, const float * values) {
        const int64_t n_rows = ggml_nelements(t) / t->ne[0];
        if (t->type == GGML_TYPE_F32) {
            memcpy(t->data, values, ggml_nbytes(t));
        } else {
            ggml_quantize_chunk(t->type, values, t->data, 0, n_rows, t->ne[0], nullptr);
        }
    }
};

int main(int argc, char ** argv) {
    const int n_threads = argc > 1 ? atoi(argv[1]) : (int) std::max(1u, std::thread::hardware_concurrency());
    const int n_rounds  = argc > 2 ? atoi(argv[2]) : 15;
    if (n_threads < 1 || n_rounds < 1) {
        fprintf(stderr, "usage: ghosts_bench [THREADS] [ROUNDS], each at least 1\n");
        return 2;
    }
    printf("microseconds for a ghost, %d threads\n\n", n_threads);
    printf("%-30s %-20s %8s %8s %8s %14s %14s\n", "model", "batch", "node", "dense", "chosen", "dense : node",
        "chosen : node");
    for (const Shape & shape : SHAPES) {
        Bench bench(shape, n_threads);
        for (const Load & load : LOADS) {
            const std::vector<double> us = bench.measure(load, n_rounds);
            printf("%-30s %-20s %8.2f %8.2f %8.2f %14.2f %14.2f\n", shape.name, load.name, us[0], us[1], us[2],
                us[1] / us[0], us[2] / us[0]);
        }
    }
    return 0;
}
