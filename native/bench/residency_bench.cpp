// What the residency table costs the compute threads and the readers, without a disk: by layer of a token whose experts
// are all absent, by guess, and by load where layers have experts of one size or of several. Then what the policy
// learned costs: the arithmetic of a token, and a layer that follows on one without a miss, whose wait would have
// hidden it.
//
//     residency_bench [DIRECTORY]
//
// A small file is written to DIRECTORY (default: /tmp) and removed. Times are medians.

#include "synthetic.h"

#include "banks/host_bank.h"
#include "residency/table.h"

#include <chrono>
#include <random>

using namespace pyorch;

static constexpr int N_USED = 8;

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double median(std::vector<double> & times) {
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

static pyorch_config make_config(const ModelMap & map, double share) {
    pyorch_config config = {};
    config.budget_bytes  = std::max(map.floor_bytes(), (uint64_t) (share * (double) map.slots_bytes()));
    config.policy        = PYORCH_FINEMOE;
    return config;
}

static Table make_table(const ModelMap & map, const pyorch_config & config) {
    return Table(map, std::make_unique<HostBank>(map, config.budget_bytes), call_source(touch_pages, nullptr),
        plain_codec(), config);
}

// A context, and a reader on its thread.
class Bench : public LocalReader {
public:
    explicit Bench(Table & table) : LocalReader(table.loader()), table(table) {}

    // Experts of a layer that are absent, or are not.
    std::vector<int> choose(int layer, int n, bool absent) {
        table.resident(layer, mask);
        std::vector<int> ids;
        for (int id = 0; id < (int) mask.size(); ++id) {
            if ((mask[id] == 0) == absent) {
                ids.push_back(id);
            }
        }
        std::shuffle(ids.begin(), ids.end(), rng);
        ids.resize(std::min<size_t>(n, ids.size()));
        std::sort(ids.begin(), ids.end());
        return ids;
    }

    // Seconds in the calls of a compute thread.
    double pass(int layer, const std::vector<int> & ids) {
        const double begin = seconds();
        table.acquire(owner, layer, { ids, ids, 1 });
        const double acquired = seconds();
        read_all();
        const double read = seconds();
        table.release(owner);
        return seconds() - read + acquired - begin;
    }

    Table & table;
    Owner   owner = { this };

private:
    std::mt19937         rng{ 1 };
    std::vector<uint8_t> mask;
};

static void measure_table(const std::string & path, int n_layers, int n_expert) {
    const ModelMap      map   = synthetic_map(path, n_layers, n_expert, [](int) { return 2; });
    Table               table = make_table(map, make_config(map, 0.5));
    Bench               bench(table);
    std::vector<double> absent, resident, want, guess;
    constexpr int       N_TOKENS = 60;
    for (int token = 0; token < N_TOKENS; ++token) {
        for (int layer = 0; layer < n_layers; ++layer) {
            // Until the budget is full there is nothing to evict.
            const bool   warm = token >= N_TOKENS / 2;
            const bool   hits = warm && token % 2;
            const double time = bench.pass(layer, bench.choose(layer, N_USED, !hits));
            if (warm) {
                (hits ? resident : absent).push_back(time);
            }
            if (!warm) {
                continue;
            }
            const int                next = (layer + 1) % n_layers;
            std::vector<Table::Want> wants;
            for (int id : bench.choose(next, N_USED, true)) {
                wants.push_back({ id, 0.5, true, false });
            }
            double begin = seconds();
            bench.table.expect(bench.owner.context, next, layer, std::vector<float>(n_expert, 0.4f));
            bench.table.want(bench.owner.context, next, layer, wants);
            want.push_back(seconds() - begin);
            ReadRequest request;
            begin = seconds();
            while (bench.table.loader().try_next(request)) {
                const double took = seconds() - begin;
                if (request.role == 0) {
                    guess.push_back(took); // the first request of an expert, and the memory for all of it
                }
                bench.table.loader().finish(request, (int64_t) request.size, 1);
                begin = seconds();
            }
        }
    }
    printf("%3d layers x %3d experts: %5.1f us a layer whose %d experts are absent, %.1f us if they are resident; "
           "%.1f us to note %zu guesses, %.1f us to begin one\n",
        n_layers, n_expert, 1e6 * median(absent), N_USED, 1e6 * median(resident), 1e6 * median(want), (size_t) N_USED,
        1e6 * median(guess));
}

static void measure_loads(const std::string & path, const char * what, int rows_even, int rows_odd) {
    constexpr int       N_LAYERS = 16, N_EXPERT = 32, N_TOKENS = 80;
    const auto          rows  = [&](int layer) { return layer % 2 ? rows_odd : rows_even; };
    const ModelMap      map   = synthetic_map(path, N_LAYERS, N_EXPERT, rows);
    Table               table = make_table(map, make_config(map, 0.4));
    Bench               bench(table);
    std::vector<double> loads;
    double              begin = 0;
    uint64_t            n     = 0;
    for (int token = 0; token < N_TOKENS; ++token) {
        if (token == N_TOKENS / 2) {
            bench.table.reset_stats();
            begin = seconds();
        }
        for (int layer = 0; layer < N_LAYERS; ++layer) {
            const auto   ids   = bench.choose(layer, N_USED, true);
            const double start = seconds();
            bench.pass(layer, ids);
            if (token >= N_TOKENS / 2) {
                loads.push_back((seconds() - start) / (double) std::max<size_t>(1, ids.size()));
                n += ids.size();
            }
        }
    }
    printf("%s: %.1f us a load (mean %.1f), %llu loads\n", what, 1e6 * median(loads),
        1e6 * (seconds() - begin) / (double) n, (unsigned long long) n);
}

// What a token's visits teach, once there are as many moments as there is room for.
static double learning_seconds(int n_layers, int n_expert) {
    constexpr int       N_TOKENS = 60;
    LearnedValue        learned(std::vector<int>(n_layers, n_expert), N_USED);
    std::mt19937        rng(1);
    std::vector<double> times;
    for (int token = 0; token < learned.n_moments() + N_TOKENS; ++token) {
        double spent = 0;
        for (int layer = 0; layer < n_layers; ++layer) {
            Visit visit = { &learned, layer, true, {} };
            while ((int) visit.experts.size() < N_USED) {
                const int id = (int) (rng() % n_expert);
                if (std::find(visit.experts.begin(), visit.experts.end(), id) == visit.experts.end()) {
                    visit.experts.push_back(id);
                }
            }
            const double begin = seconds();
            learned.visit(visit);
            spent += seconds() - begin;
        }
        times.push_back(spent);
    }
    times.erase(times.begin(), times.end() - N_TOKENS);
    return median(times);
}

// A layer whose experts are resident, where nothing hides what the layer before taught.
static double resident_layer_seconds(const ModelMap & map, pyorch_policy policy) {
    pyorch_config config      = make_config(map, 0.99);
    config.policy             = policy;
    Table               table = make_table(map, config);
    Bench               bench(table);
    std::vector<double> times;
    for (int token = 0; token < 40; ++token) {
        for (int layer = 0; layer < (int) map.layers.size(); ++layer) {
            const double time = bench.pass(layer,
                token ? bench.choose(layer, N_USED, false) : bench.choose(layer, map.layers[layer].n_expert, true));
            if (token > 1) {
                times.push_back(time);
            }
        }
    }
    return median(times);
}

static void measure_learning(const std::string & path, int n_layers, int n_expert) {
    const ModelMap map = synthetic_map(path, n_layers, n_expert, [](int) { return 2; });
    printf("%3d layers x %3d experts, policy learned: %.0f us a token; a layer whose %d experts are resident %.1f us, "
           "%.1f with finemoe\n",
        n_layers, n_expert, 1e6 * learning_seconds(n_layers, n_expert), N_USED,
        1e6 * resident_layer_seconds(map, PYORCH_LEARNED), 1e6 * resident_layer_seconds(map, PYORCH_FINEMOE));
}

int main(int argc, char ** argv) {
    const std::string directory = argc > 1 ? argv[1] : "/tmp";
    const std::string path      = directory + "/residency_bench." + std::to_string(getpid()) + ".gguf";
    measure_table(path, 48, 128);
    measure_table(path, 58, 256);
    // Of 1 MiB a matrix; and of 1 and 1.25 MiB by turns, as where every other layer is quantized more finely.
    measure_loads(path, "experts of one size", 32768, 32768);
    measure_loads(path, "experts of two sizes", 32768, 40960);
    measure_learning(path, 8, 64);
    measure_learning(path, 24, 32);
    measure_learning(path, 48, 128);
    measure_learning(path, 58, 256);
    return 0;
}
