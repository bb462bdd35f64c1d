// The cache-affinity schedule of ZipMoE against the best of all orders and against first come first served; and, for
// kernels that go matrix by matrix, against the order in which the loader reads and decodes.

#include "loading/schedule.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>

using namespace pyorch;

static int n_failed = 0;

static void require(bool ok, const char * claim) {
    if (!ok) {
        fprintf(stderr, "not so: %s\n", claim);
        ++n_failed;
    }
}

using Tasks  = std::vector<RecoveryTask>;
using Blocks = std::vector<RecoveryBlock>;

// Of all computing, if each expert is computed, one after the other, once all its matrices are there, those that are
// there first before others.
static double makespan(const Tasks & tasks, const std::vector<double> & recovered) {
    int n_experts = 0;
    for (const RecoveryTask & task : tasks) {
        n_experts = std::max(n_experts, task.expert + 1);
    }
    std::vector<std::pair<double, double>> experts((size_t) n_experts, { 0, 0 }); // when it is there, what it takes
    for (size_t i = 0; i < tasks.size(); ++i) {
        auto & [ready, takes] = experts[(size_t) tasks[i].expert];
        ready                 = std::max(ready, recovered[i]);
        takes                 = tasks[i].compute;
    }
    std::sort(experts.begin(), experts.end());
    double end = 0;
    for (const auto & [ready, takes] : experts) {
        end = std::max(end, ready) + takes;
    }
    return end;
}

static double makespan(const Tasks & tasks, const Blocks & blocks, const Recoverer & recoverer) {
    return makespan(tasks, recovery_times(tasks, blocks, recoverer));
}

// The best there is: all orders of reads, and for each all orders of decoding, in which a worker may wait for a shard
// while it could decode another.
class Optimum {
public:
    Optimum(const Tasks & tasks, const Recoverer & recoverer) : tasks(tasks), recoverer(recoverer) {
        for (int i = 0; i < (int) tasks.size(); ++i) {
            for (int k = 0; k < tasks[i].n_shards; ++k) {
                shards.push_back(i);
                if (tasks[i].e_read > 0) {
                    reads.push_back(2 * i);
                }
            }
            if (tasks[i].sm_read > 0) {
                reads.push_back(2 * i + 1);
            }
        }
    }

    double find() {
        double best = INFINITY;
        std::sort(reads.begin(), reads.end());
        do { // shards of a task are alike
            const size_t                     n = tasks.size();
            std::vector<std::vector<double>> ready(n);
            std::vector<double>              sm(n, 0);
            double                           disk = 0;
            for (int read : reads) {
                const RecoveryTask & task = tasks[(size_t) read / 2];
                if (read % 2) {
                    sm[(size_t) read / 2] = disk += task.sm_read;
                } else {
                    ready[(size_t) read / 2].push_back(disk += task.e_read / task.n_shards);
                }
            }
            for (size_t i = 0; i < n; ++i) {
                ready[i].resize((size_t) tasks[i].n_shards, 0);
                for (double & at : ready[i]) {
                    at = std::max(at, recoverer.one_pass ? sm[i] : 0);
                }
            }
            std::sort(shards.begin(), shards.end());
            do {
                std::vector<double> recovered = sm, workers((size_t) recoverer.n_workers, 0);
                std::vector<size_t> next(n, 0);
                for (int i : shards) {
                    auto & worker = *std::min_element(workers.begin(), workers.end());
                    worker        = std::max(worker, ready[i][next[i]++]) + tasks[i].decode / tasks[i].n_shards;
                    recovered[i]  = std::max(recovered[i], worker);
                }
                best = std::min(best, makespan(tasks, recovered));
            } while (std::next_permutation(shards.begin(), shards.end()));
        } while (std::next_permutation(reads.begin(), reads.end()));
        return best;
    }

private:
    const Tasks &     tasks;
    const Recoverer & recoverer;
    std::vector<int>  reads, shards;
};

// Algorithm 1 written once more, line by line and without a thought for its cost: the tests compare the two.
class Printed {
public:
    Printed(const Tasks & tasks, const Recoverer & recoverer, size_t max_block) :
            tasks(tasks), recoverer(recoverer), max_block(max_block) {}

    Blocks blocks() {
        std::vector<int> type_1, type_2;
        for (int i = 0; i < (int) tasks.size(); ++i) {
            std::vector<int> & type = tasks[(size_t) i].sm_read > 0 ? type_1 : type_2; // line 3
            type.insert(std::find_if(type.begin(), type.end(), [&](int other) { return goes_before(i, other); }), i);
        }
        Blocks all;
        while (!type_1.empty()) {                      // line 7
            std::vector<int> block = { take(type_1) }; // lines 9 and 10
            while (block.size() < max_block && !dominant(block) && !(type_1.empty() && type_2.empty())) {
                const int task = take(type_2.empty() ? type_1 : type_2); // lines 8, 12 and 21
                block          = with(block, task);
            }
            for (int i : block) {
                done.push_back(i);
            }
            ends.push_back(done.size());
            all.push_back(block);
        }
        if (!type_2.empty()) { // as printed, these are in no block
            all.push_back(type_2);
        }
        return all;
    }

private:
    struct Times {
        double              disk = 0;
        std::vector<double> free, idle;
    };

    const Tasks &       tasks;
    const Recoverer     recoverer;
    const size_t        max_block;
    std::vector<int>    done; // of the blocks before
    std::vector<size_t> ends;

    bool goes_before(int a, int b) const { // lines 4 and 5
        const RecoveryTask &x = tasks[(size_t) a], &y = tasks[(size_t) b];
        return x.compute > y.compute || (x.compute == y.compute && x.expert < y.expert);
    }

    static int take(std::vector<int> & from) {
        const int first = from.front();
        from.erase(from.begin());
        return first;
    }

    // From the beginning on: blocks one after the other, and what each worker waits for in the last of them.
    Times simulate(const std::vector<int> & last) const {
        Times times{ 0, std::vector<double>((size_t) recoverer.n_workers, 0), {} };
        for (size_t block = 0, from = 0; block <= ends.size(); ++block) {
            const bool             is_last = block == ends.size();
            const std::vector<int> order =
                is_last ? last : std::vector<int>(done.begin() + (long) from, done.begin() + (long) ends[block]);
            from       = is_last ? from : ends[block];
            times.idle = std::vector<double>((size_t) recoverer.n_workers, 0);
            run(order, times);
        }
        return times;
    }

    void run(const std::vector<int> & order, Times & times) const {
        std::vector<std::pair<double, double>> shards; // when it was read, what decoding takes
        for (int i : order) {
            const RecoveryTask & task  = tasks[(size_t) i];
            const double         first = times.disk + (recoverer.one_pass ? task.sm_read : 0);
            for (int k = 1; k <= task.n_shards; ++k) {
                const double read  = first + task.e_read * k / task.n_shards;
                const bool   waits = task.e_read > 0 || (recoverer.one_pass && task.sm_read > 0);
                shards.emplace_back(waits ? read : 0, task.decode / task.n_shards);
            }
            times.disk = first + task.e_read;
        }
        for (int i : order) {
            times.disk += recoverer.one_pass ? 0 : tasks[(size_t) i].sm_read;
        }
        while (!shards.empty()) {
            const size_t worker =
                (size_t) (std::min_element(times.free.begin(), times.free.end()) - times.free.begin());
            const double now = times.free[worker];
            auto         next =
                std::find_if(shards.begin(), shards.end(), [&](const auto & shard) { return shard.first <= now; });
            if (next == shards.end()) {
                next = std::min_element(
                    shards.begin(), shards.end(), [](const auto & a, const auto & b) { return a.first < b.first; });
            }
            const double begin = std::max(now, next->first);
            times.idle[worker] += begin - now;
            times.free[worker] = begin + next->second;
            shards.erase(next);
        }
    }

    // Definition A.1 with the chunk of exponents that takes longest.
    bool dominant(const std::vector<int> & block) const {
        Times  times = simulate(block);
        double chunk = 0;
        int    most  = 1;
        for (const RecoveryTask & task : tasks) {
            chunk = std::max(chunk, task.e_read / task.n_shards);
            most  = std::max(most, task.n_shards);
        }
        std::sort(times.free.begin(), times.free.end());
        for (int k = 1; k <= std::min(recoverer.n_workers, most); ++k) {
            if (times.free[(size_t) k - 1] - times.disk < k * chunk) {
                return false;
            }
        }
        return true;
    }

    // Lines 13 to 20.
    std::vector<int> with(const std::vector<int> & block, int task) const {
        const Times before = simulate(block);
        for (size_t place = 0; place <= block.size(); ++place) {
            std::vector<int> longer = block;
            longer.insert(longer.begin() + (long) place, task);
            const Times after = simulate(longer);
            bool        idle  = false;
            for (size_t worker = 0; worker < after.idle.size(); ++worker) {
                idle |= after.idle[worker] > before.idle[worker] * (1 + 1e-9);
            }
            if (!idle) {
                return longer;
            }
        }
        const bool any_type_2 =
            std::any_of(block.begin(), block.end(), [&](int i) { return tasks[(size_t) i].sm_read == 0; });
        for (size_t place = block.size(); place > 0; --place) {
            const RecoveryTask & other = tasks[(size_t) block[place - 1]];
            if ((other.sm_read == 0 || !any_type_2) && other.compute >= tasks[(size_t) task].compute) {
                std::vector<int> longer = block;
                longer.insert(longer.begin() + (long) place, task);
                return longer;
            }
        }
        std::vector<int> longer = { task };
        longer.insert(longer.end(), block.begin(), block.end());
        return longer;
    }
};

// One model on one machine: all matrices take the same, but for what is in memory of them, and the tokens of an expert.
static Tasks random_tasks(std::mt19937 & rng, int n_experts, int n_matrices, int n_shards) {
    std::uniform_real_distribution<double> any(0, 1);
    const double                           sm = 1, e = 0.2 + 0.6 * any(rng), decode = 3 * any(rng) * any(rng);
    Tasks                                  tasks;
    for (int expert = 0; expert < n_experts; ++expert) {
        const int    form    = (int) (4 * any(rng)); // missed, compressed, SM, E
        const double compute = 0.5 * any(rng);
        for (int matrix = 0; matrix < n_matrices; ++matrix) {
            tasks.push_back(
                { expert, form == 0 || form == 2 ? e : 0, form == 0 || form == 3 ? sm : 0, decode, n_shards, compute });
        }
    }
    return tasks;
}

static Blocks first_come(const Tasks & tasks) {
    Blocks blocks;
    for (int i = 0; i < (int) tasks.size(); ++i) {
        blocks.push_back({ i });
    }
    return blocks;
}

static bool has_each_once(const Tasks & tasks, const Blocks & blocks) {
    std::vector<int> all;
    for (const RecoveryBlock & block : blocks) {
        all.insert(all.end(), block.begin(), block.end());
    }
    std::sort(all.begin(), all.end());
    std::vector<int> wanted(tasks.size());
    std::iota(wanted.begin(), wanted.end(), 0);
    return all == wanted;
}

// Of a layer whose kernels go through all experts with one matrix before they begin with the next: first through those
// that are there, then, ascending, through the others, as mul_mat_id does. tasks: matrix by matrix, of all experts
// each. Read and decoded in an order: of what is there, a free worker takes a shard of the first.
static double layer_seconds(const Tasks & tasks, const std::vector<int> & order, int n_experts, int n_workers) {
    std::vector<double> ready(tasks.size(), 0), recovered(tasks.size(), 0), workers((size_t) n_workers, 0);
    std::vector<int>    left(tasks.size());
    double              disk   = 0;
    int                 n_left = 0;
    for (int i : order) {
        const RecoveryTask & task = tasks[(size_t) i];
        disk += task.e_read + task.sm_read;
        ready[(size_t) i]          = task.e_read + task.sm_read > 0 ? disk : 0;
        n_left += left[(size_t) i] = task.n_shards;
    }
    for (; n_left > 0; --n_left) {
        double & worker = *std::min_element(workers.begin(), workers.end());
        int      next   = -1;
        for (int i : order) {
            if (left[(size_t) i] > 0 &&
                (next < 0 || std::max(ready[(size_t) i], worker) < std::max(ready[(size_t) next], worker))) {
                next = i;
            }
        }
        const RecoveryTask & task = tasks[(size_t) next];
        worker                    = std::max(worker, ready[(size_t) next]) + task.decode / task.n_shards;
        recovered[(size_t) next]  = std::max(recovered[(size_t) next], worker);
        --left[(size_t) next];
    }
    double now = 0;
    for (size_t first = 0; first < tasks.size(); first += (size_t) n_experts) {
        std::vector<size_t> late;
        for (size_t i = first; i < first + (size_t) n_experts; ++i) {
            if (recovered[i] > now) {
                late.push_back(i);
            } else {
                now += tasks[i].compute;
            }
        }
        for (size_t i : late) {
            now = std::max(now, recovered[i]) + tasks[i].compute;
        }
    }
    return now;
}

// What needs no reading first, then matrix by matrix, experts ascending.
static std::vector<int> order_of_kernels(const Tasks & tasks) {
    std::vector<int> order(tasks.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_partition(
        order.begin(), order.end(), [&](int i) { return tasks[(size_t) i].e_read + tasks[(size_t) i].sm_read == 0; });
    return order;
}

static void append(
    std::vector<int> & order, const Tasks & tasks, const std::vector<int> & which, const Recoverer & by) {
    Tasks some;
    for (int i : which) {
        some.push_back(tasks[(size_t) i]);
    }
    for (const RecoveryBlock & block : schedule(some, by)) {
        for (int i : block) {
            order.push_back(which[(size_t) i]);
        }
    }
}

static void the_order_of_kernels_is_no_later_than_the_schedule() {
    constexpr int                          N_MATRICES = 3, N_ROUNDS = 200;
    std::mt19937                           rng{ 11 };
    std::uniform_real_distribution<double> any(0, 1);
    for (const double most : { 0.3, 0.8, 1.5, 3.0 }) { // that decoding a matrix takes, of reading it
        double all = 0, within = 0, bound = 0;
        for (int round = 0; round < N_ROUNDS; ++round) {
            const Recoverer  recoverer{ 1 << round % 3, true };
            const int        n_experts = 1 + (int) (6 * any(rng));
            const double     decode = most * (0.5 + 0.5 * any(rng)), compute = 0.02 + 0.2 * any(rng);
            std::vector<int> forms; // missed, compressed, SM, E
            for (int expert = 0; expert < n_experts; ++expert) {
                forms.push_back((int) (4 * any(rng)));
            }
            Tasks tasks;
            for (int matrix = 0; matrix < N_MATRICES; ++matrix) {
                for (int expert = 0; expert < n_experts; ++expert) {
                    const int form = forms[(size_t) expert];
                    tasks.push_back({ expert, form == 0 || form == 2 ? 0.28 : 0, form == 0 || form == 3 ? 0.72 : 0,
                        decode, 4, compute });
                }
            }
            std::vector<int> by_expert, scheduled, within_matrices;
            for (int expert = 0; expert < n_experts; ++expert) {
                for (int matrix = 0; matrix < N_MATRICES; ++matrix) {
                    by_expert.push_back(matrix * n_experts + expert);
                }
            }
            append(scheduled, tasks, by_expert, recoverer);
            for (int matrix = 0; matrix < N_MATRICES; ++matrix) {
                std::vector<int> of_matrix((size_t) n_experts);
                std::iota(of_matrix.begin(), of_matrix.end(), matrix * n_experts);
                append(within_matrices, tasks, of_matrix, recoverer);
            }
            const auto seconds = [&](const std::vector<int> & order) {
                return layer_seconds(tasks, order, n_experts, recoverer.n_workers);
            };
            const double ours = seconds(order_of_kernels(tasks));
            double       read = 0, decoding = 0;
            for (const RecoveryTask & task : tasks) {
                read += task.e_read + task.sm_read;
                decoding += task.decode / recoverer.n_workers;
            }
            all += seconds(scheduled) / ours / N_ROUNDS;
            within += seconds(within_matrices) / ours / N_ROUNDS;
            bound += ours / std::max({ read, decoding, compute * (double) tasks.size() }) / N_ROUNDS;
        }
        printf("decoding up to %.1f of reading, of the order of kernels: scheduled %.3f, within each matrix %.3f; that "
               "order "
               "is %.3f of reading, decoding or computing alone\n",
            most, all, within, bound);
        require(all >= 1 && within >= 1, "where kernels go matrix by matrix, their order is on average no later");
    }
}

int main() {
    the_order_of_kernels_is_no_later_than_the_schedule();
    std::mt19937 rng{ 7 };
    double       worst = 0, sum = 0;
    int          n = 0;
    for (int round = 0; round < 240; ++round) {
        const int       n_shards = 1 + round % 2;
        const Recoverer recoverer{ 1 + round % 3, round % 4 == 3 };
        const Tasks     tasks = random_tasks(rng, n_shards == 1 ? 4 : 2 + round / 2 % 2, 1, n_shards);
        const double    best  = Optimum(tasks, recoverer).find();
        const double    found = makespan(tasks, schedule(tasks, recoverer), recoverer);
        require(found >= best * (1 - 1e-9), "nothing is better than the best");
        const double bound = 3 - 1.0 / recoverer.n_workers;
        require(found <= bound * best * (1 + 1e-9), "theorem 3.1: (3 - 1 / L) of the optimum at most");
        if (best > 0) {
            worst = std::max(worst, found / best);
            sum += found / best;
            ++n;
        }
    }
    printf("of the best of all orders: %.3f on average, %.3f at most\n", sum / n, worst);

    for (const bool one_pass : { false, true }) {
        double ours = 0, theirs = 0;
        for (int round = 0; round < 300; ++round) {
            const Recoverer recoverer{ 1 + round % 4, one_pass };
            const Tasks     tasks  = random_tasks(rng, 2 + round % 7, 3, 1 + round % 3);
            const Blocks    blocks = schedule(tasks, recoverer);
            require(has_each_once(tasks, blocks), "each task is in one block, once");
            require(blocks == Printed(tasks, recoverer, 16).blocks(), "the blocks are those of algorithm 1");
            const double first = makespan(tasks, first_come(tasks), recoverer);
            ours += makespan(tasks, blocks, recoverer) / first;
            theirs += 1;
        }
        printf("%s: %.3f of first come first served\n", one_pass ? "one pass" : "exponents first", ours / theirs);
        require(ours <= theirs, "on average no later than first come first served");
    }

    const Recoverer two{ 2, false };
    require(schedule({}, two).empty(), "of nothing there is nothing");
    require(schedule({ { 0, 0, 0, 1, 1, 1 }, { 1, 1, 0, 1, 1, 2 } }, two) == Blocks{ { 1, 0 } },
        "where no signs and mantissas are read, those for which the most computing waits are first");
    // The worker would wait for the exponents of the base; the compressed expert is decoded meanwhile.
    require(schedule({ { 0, 1, 2, 1, 1, 1 }, { 1, 0, 0, 1, 1, 1 } }, { 1, false }) == Blocks{ { 1, 0 } },
        "what needs no read is decoded while others are read");
    // The base keeps the worker busy beyond all reads: the rest makes a block of its own.
    require(schedule({ { 0, 1, 2, 9, 1, 1 }, { 1, 1, 2, 9, 1, 1 } }, { 1, false }) == Blocks{ { 0 }, { 1 } },
        "a block ends when the workers have more to do than the disk");
    Tasks many(400, { 0, 1, 2, 0.1, 1, 1 });
    require(has_each_once(many, schedule(many, two)), "a prompt's tasks are ordered, too");
    return n_failed != 0;
}
