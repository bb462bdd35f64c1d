#include "device/rates.h"

#include "device/bank.h"
#include "device/link.h"
#include "base/cpu_backend.h"
#include "base/cpu_time.h"
#include "model/fatal.h"
#include "model/layout.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>

namespace pyorch {
namespace {

constexpr int      ROUNDS      = 3;        // the fastest counts: others use the machine, too
constexpr int      MORE_ROWS   = 8;        // of an expert
constexpr uint64_t LEAST_BYTES = 64 << 20; // of weights, more than the caches

template <typename Work>
double fastest(Work work) {
    work(); // compiles kernels, touches memory
    double least = INFINITY;
    for (int round = 0; round < ROUNDS; ++round) {
        const uint64_t begin = clock_ns();
        work();
        least = std::min(least, 1e-9 * (double) (clock_ns() - begin));
    }
    return std::max(least, 1e-9);
}

// Matrices of some experts in a backend's memory, and graphs that compute with all of them.
class Bench {
public:
    Bench(ggml_backend_t backend, const MoeLayer & layer, int n_experts) : backend(backend), n_experts(n_experts) {
        constexpr size_t N_TENSORS = 8 * PYORCH_MAX_ROLES;
        ctx.reset(ggml_init({ N_TENSORS * ggml_tensor_overhead() + 2 * ggml_graph_overhead(), nullptr, true }));
        for (const auto & tensor : layer.tensors) {
            weights.push_back(ggml_new_tensor_3d(ctx.get(), type_of(tensor), tensor.n_in, tensor.n_out, n_experts));
        }
        few  = graph(1);
        more = graph(MORE_ROWS);
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
        if (!buffer) {
            throw Failure(PYORCH_MEMORY, format("there is no memory to measure %s", ggml_backend_name(backend)));
        }
        ggml_backend_buffer_clear(buffer.get(), 0);
        std::vector<int32_t> each(n_experts * MORE_ROWS);
        for (size_t i = 0; i < each.size(); ++i) {
            each[i] = (int32_t) (i % n_experts);
        }
        for (ggml_tensor * t : ids) {
            ggml_backend_tensor_set(t, each.data(), 0, ggml_nbytes(t));
        }
    }

    // From page-locked host memory like a bank's, each matrix from its own place there.
    double upload_seconds(ggml_backend_dev_t device, uint64_t largest) {
        const size_t                                 size = round_up(bytes(), PAGE);
        const std::unique_ptr<char, decltype(&free)> from((char *) aligned_alloc(PAGE, size), free);
        if (!from) {
            throw Failure(PYORCH_MEMORY, format("there is no memory to measure %s", ggml_backend_dev_name(device)));
        }
        memset(from.get(), 1, size);
        PageLocks  locks(std::vector<ggml_backend_dev_t>{ device });
        DeviceLink link(device, largest, &locks);
        locks.lock(from.get(), size);
        const auto                                    unlock = [&](char * begin) { locks.unlock(begin, size); };
        const std::unique_ptr<char, decltype(unlock)> locked(from.get(), unlock); // it waits for the link
        return fastest([&] {
            const char * next = from.get();
            for (ggml_tensor * t : weights) {
                for (int e = 0; e < n_experts; ++e, next += t->nb[2]) {
                    link.send(t, e * t->nb[2], next, t->nb[2]);
                }
            }
            link.wait();
            wait(weights.back());
        });
    }

    double compute_seconds(bool many) {
        return fastest([&] {
            ggml_cgraph * graph = many ? more : few;
            if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
                throw Failure(PYORCH_IO, format("%s does not compute", ggml_backend_name(backend)));
            }
            wait(ggml_graph_node(graph, -1));
        });
    }

    uint64_t bytes() const {
        return std::accumulate(weights.begin(), weights.end(), (uint64_t) 0,
            [](uint64_t sum, const ggml_tensor * t) { return sum + ggml_nbytes(t); });
    }

private:
    ggml_backend_t             backend;
    const int                  n_experts;
    ggml_context_ptr           ctx;
    ggml_backend_buffer_ptr    buffer;
    std::vector<ggml_tensor *> weights, ids;
    ggml_cgraph *              few  = nullptr;
    ggml_cgraph *              more = nullptr;

    // Waits until the backend is done. A backend of another process only sends its commands: a read makes it wait.
    void wait(const ggml_tensor * t) {
        ggml_backend_synchronize(backend);
        char byte;
        ggml_backend_tensor_get(t, &byte, 0, sizeof(byte));
    }

    // n_rows for each expert.
    ggml_cgraph * graph(int n_rows) {
        ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), GGML_DEFAULT_GRAPH_SIZE / 8, false);
        ids.push_back(ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, n_experts, n_rows));
        for (ggml_tensor * t : weights) {
            ggml_tensor * rows = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, t->ne[0], 1, n_rows);
            ggml_build_forward_expand(graph, ggml_mul_mat_id(ctx.get(), t, rows, ids.back()));
        }
        return graph;
    }
};

// Weights a second for the first row of an expert, and for each further one.
void rates_of(Bench & bench, double & first, double & more) {
    const double one = bench.compute_seconds(false), many = bench.compute_seconds(true);
    first = (double) bench.bytes() / one;
    more  = (MORE_ROWS - 1) * (double) bench.bytes() / std::max(many - one, one / 1000);
}

ggml_backend_ptr open(ggml_backend_dev_t device) {
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw Failure(PYORCH_IO, format("%s cannot be used", ggml_backend_dev_name(device)));
    }
    return backend;
}

} // namespace

DeviceRates measure_device(const ModelMap & map, ggml_backend_dev_t device, int n_threads) {
    const MoeLayer &       layer = map.layers.front();
    const int              n     = (int) std::clamp<uint64_t>(LEAST_BYTES / layer.expert_bytes(), 1, layer.n_expert);
    DeviceRates            rates;
    FatalGuard             guard; // the process of a device may end
    const ggml_backend_ptr backend = open(device);
    Bench                  bench(backend.get(), layer, n);
    rates.upload = (double) bench.bytes() / bench.upload_seconds(device, largest_matrix(layer));
    rates_of(bench, rates.device_first, rates.device_more);

    const ggml_backend_ptr here = open(cpu_backend().device);
    cpu_backend().set_n_threads(here.get(), n_threads);
    Bench processor(here.get(), layer, n);
    rates_of(processor, rates.processor_first, rates.processor_more);
    return rates;
}

} // namespace pyorch
