#include "loading/schedule.h"

#include <algorithm>
#include <numeric>

namespace pyorch {

namespace {

// Most tasks of a block: the search for the place of another one costs the cube of their number.
constexpr size_t MAX_BLOCK = 16;

// Tolerance: times are sums of the same numbers in different orders.
constexpr double ROUNDING = 1 + 1e-9;

using Tasks = std::vector<RecoveryTask>;

// When the disk and each worker become free.
struct Machine {
    double              disk = 0;
    std::vector<double> workers;
};

struct Progress {
    Machine             after;
    std::vector<double> idle;      // of each worker, between its tasks
    std::vector<double> recovered; // by task

    Progress(const Machine & before, size_t n_tasks) :
            after(before), idle(before.workers.size(), 0), recovered(n_tasks, 0) {}

    // Line 13 of the algorithm: "no additional idle period on any thread".
    bool idles_no_more_than(const Progress & other) const {
        return std::equal(
            idle.begin(), idle.end(), other.idle.begin(), [](double a, double b) { return a <= b * ROUNDING; });
    }
};

struct Shard {
    double ready;
    int    task;
    bool   done;
};

bool reads_sm(const RecoveryTask & task) { return task.sm_read > 0; }

// The reads of a block, and the shards to decode after them.
void read(
    const Tasks & tasks, const RecoveryBlock & block, bool one_pass, Progress & progress, std::vector<Shard> & shards) {
    double & disk = progress.after.disk;
    for (int i : block) {
        if (one_pass) {
            disk += tasks[i].sm_read;
        }
        for (int k = 0; k < tasks[i].n_shards; ++k) {
            disk += tasks[i].e_read / tasks[i].n_shards;
            shards.push_back({ tasks[i].e_read > 0 || (one_pass && reads_sm(tasks[i])) ? disk : 0, i, false });
        }
    }
    for (int i : block) {
        if (!one_pass && reads_sm(tasks[i])) {
            disk += tasks[i].sm_read;
            progress.recovered[i] = disk;
        }
    }
}

// Decodes: each worker takes the first shard that is read, or the next to come.
void decode(const Tasks & tasks, Progress & progress, std::vector<Shard> & shards) {
    std::vector<double> & workers = progress.after.workers;
    for (size_t left = shards.size(); left > 0; --left) {
        auto worker = std::min_element(workers.begin(), workers.end());
        auto next   = shards.end();
        for (auto shard = shards.begin(); shard != shards.end(); ++shard) {
            if (shard->done || (next != shards.end() && shard->ready >= next->ready)) {
                continue;
            }
            next = shard;
            if (shard->ready <= *worker) {
                break;
            }
        }
        const RecoveryTask & task  = tasks[next->task];
        const double         start = std::max(*worker, next->ready);
        progress.idle[(size_t) (worker - workers.begin())] += start - *worker;
        *worker                        = start + task.decode / task.n_shards;
        next->done                     = true;
        progress.recovered[next->task] = std::max(progress.recovered[next->task], *worker);
    }
}

// Runs one block after the blocks before it.
Progress run(const Tasks & tasks, const RecoveryBlock & block, const Machine & before, bool one_pass) {
    Progress           progress(before, tasks.size());
    std::vector<Shard> shards;
    read(tasks, block, one_pass, progress, shards);
    decode(tasks, progress, shards);
    return progress;
}

// Definition A.1: the workers have so much to do that the first free one does not wait for the next exponents.
bool compute_dominant(const Progress & progress, double shard_read, int max_shards) {
    std::vector<double> free = progress.after.workers;
    std::sort(free.begin(), free.end());
    const size_t n = std::min(free.size(), (size_t) max_shards);
    for (size_t i = 0; i < n; ++i) {
        if (free[i] - progress.after.disk < (double) (i + 1) * shard_read) {
            return false;
        }
    }
    return true;
}

Machine idle(const Recoverer & recoverer) {
    return { 0, std::vector<double>((size_t) std::max(1, recoverer.n_workers), 0) };
}

RecoveryBlock inserted(const RecoveryBlock & block, size_t place, int task) {
    RecoveryBlock with = block;
    with.insert(with.begin() + (long) place, task);
    return with;
}

// The place behind all tasks of its class that are recovered sooner. The class: the block's tasks without an SM read,
// or all if none is without.
size_t place_by_compute(const Tasks & tasks, const RecoveryBlock & block, int task) {
    const bool any   = std::any_of(block.begin(), block.end(), [&](int i) { return !reads_sm(tasks[i]); });
    size_t     place = 0;
    for (size_t i = 0; i < block.size(); ++i) {
        const RecoveryTask & other = tasks[block[i]];
        if ((!any || !reads_sm(other)) && other.compute >= tasks[task].compute) {
            place = i + 1;
        }
    }
    return place;
}

} // namespace

std::vector<RecoveryBlock> schedule(const Tasks & tasks, const Recoverer & recoverer) {
    std::vector<int> order(tasks.size());
    std::iota(order.begin(), order.end(), 0);
    // Tasks of an expert that take equally long stay together.
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
        const bool same = tasks[a].compute == tasks[b].compute;
        return same ? tasks[a].expert < tasks[b].expert : tasks[a].compute > tasks[b].compute;
    });
    RecoveryBlock bases, others; // tasks of type I, and of type II; the first is next
    double        shard_read = 0;
    int           max_shards = 1;
    for (int i : order) {
        (reads_sm(tasks[i]) ? bases : others).push_back(i);
        shard_read = std::max(shard_read, tasks[i].e_read / tasks[i].n_shards);
        max_shards = std::max(max_shards, tasks[i].n_shards);
    }
    std::vector<RecoveryBlock> blocks;
    Machine                    machine = idle(recoverer);
    while (!bases.empty()) {
        RecoveryBlock block{ bases.front() };
        bases.erase(bases.begin());
        Progress progress = run(tasks, block, machine, recoverer.one_pass);
        while (block.size() < MAX_BLOCK && !compute_dominant(progress, shard_read, max_shards) &&
            !(others.empty() && bases.empty())) {
            RecoveryBlock & from = others.empty() ? bases : others;
            const int       task = from.front();
            from.erase(from.begin());
            size_t place = 0;
            while (place <= block.size() &&
                !run(tasks, inserted(block, place, task), machine, recoverer.one_pass).idles_no_more_than(progress)) {
                ++place;
            }
            block    = inserted(block, place <= block.size() ? place : place_by_compute(tasks, block, task), task);
            progress = run(tasks, block, machine, recoverer.one_pass);
        }
        machine = progress.after;
        blocks.push_back(std::move(block));
    }
    if (!others.empty()) { // the workers have enough work without them
        blocks.push_back(std::move(others));
    }
    return blocks;
}

std::vector<double> recovery_times(
    const Tasks & tasks, const std::vector<RecoveryBlock> & blocks, const Recoverer & recoverer) {
    Progress           progress(idle(recoverer), tasks.size());
    std::vector<Shard> shards;
    for (const RecoveryBlock & block : blocks) {
        read(tasks, block, recoverer.one_pass, progress, shards);
    }
    decode(tasks, progress, shards);
    return progress.recovered;
}

} // namespace pyorch
