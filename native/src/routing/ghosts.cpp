#include "routing/ghosts.h"

#include "base/status.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace pyorch {
namespace {

const pyorch_ghosts & checked(const pyorch_ghosts & g) {
    if (g.n_expert < 1 || g.n_in < 1 || g.n_out < 1 || g.n_rows < 0) {
        throw Failure(PYORCH_INVALID,
            format("there are no ghosts of %d experts from %d to %d values with %d rows", g.n_expert, g.n_in, g.n_out,
                g.n_rows));
    }
    if (!g.rank || !g.mean || (g.n_rows > 0 && (!g.down || !g.up))) {
        throw Failure(PYORCH_INVALID, "ghosts need ranks, means and matrices");
    }
    int64_t n_rows = 0;
    for (int e = 0; e < g.n_expert; ++e) {
        if (g.rank[e] < -1 || g.rank[e] > std::min(g.n_in, g.n_out)) {
            throw Failure(PYORCH_INVALID, format("the ghost of expert %d cannot have the rank %d", e, g.rank[e]));
        }
        n_rows += std::max(g.rank[e], 0);
    }
    if (n_rows != g.n_rows) {
        throw Failure(PYORCH_INVALID,
            format("ghosts whose ranks sum up to %lld cannot have %d rows", (long long) n_rows, g.n_rows));
    }
    const auto check_numbers = [](const float * values, size_t n) {
        if (!std::all_of(values, values + n, [](float x) { return std::isfinite(x); })) {
            throw Failure(PYORCH_INVALID, "ghosts do not hold numbers only");
        }
    };
    check_numbers(g.mean, (size_t) g.n_expert * g.n_out);
    check_numbers(g.down, (size_t) g.n_rows * g.n_in);
    check_numbers(g.up, (size_t) g.n_rows * g.n_out);
    return g;
}

} // namespace

GhostLayer::GhostLayer(const pyorch_ghosts & g) :
        n_expert(checked(g).n_expert), n_in(g.n_in), n_out(g.n_out), rank(g.rank, g.rank + n_expert), begin(n_expert),
        mean(g.mean, n_expert, n_out), down(g.down, g.n_rows, n_in), up(g.up, g.n_rows, n_out) {
    for (int e = 0, row = 0; e < n_expert; ++e) {
        begin[e] = row;
        row += std::max(rank[e], 0);
    }
}

void GhostLayer::compute(
    int expert, const std::vector<const float *> & inputs, const std::vector<float *> & outputs) const {
    const int                  n_rows = rank[expert];
    std::vector<CompactVector> compact;
    std::vector<float>         latent(inputs.size() * n_rows);
    if (n_rows > 0) {
        for (const float * input : inputs) {
            compact.emplace_back(input, n_in);
        }
        down.multiply(compact, begin[expert], n_rows, latent.data());
    }
    for (float * output : outputs) {
        std::fill(output, output + n_out, 0.0f);
    }
    mean.add_rows(expert, 1, std::vector<float>(outputs.size(), 1.0f).data(), outputs);
    up.add_rows(begin[expert], n_rows, latent.data(), outputs);
}

std::vector<GhostJob> ghost_jobs(const GhostLayer & layer, const int32_t * requested, const std::vector<int> & slots) {
    static constexpr size_t         MOST_SLOTS = 16; // of a job: a prompt may have hundreds of one expert
    std::map<int, std::vector<int>> slots_of;
    for (int slot : slots) {
        slots_of[requested[slot]].push_back(slot);
    }
    std::vector<GhostJob> jobs;
    for (const auto & [expert, of_expert] : slots_of) {
        for (size_t i = 0; i < of_expert.size(); i += MOST_SLOTS) {
            const size_t end = std::min(i + MOST_SLOTS, of_expert.size());
            jobs.push_back({ expert, { of_expert.begin() + i, of_expert.begin() + end } });
        }
    }
    std::stable_sort(jobs.begin(), jobs.end(), [&](const GhostJob & a, const GhostJob & b) {
        return layer.work(a.expert, a.slots.size()) > layer.work(b.expert, b.slots.size());
    });
    return jobs;
}

} // namespace pyorch
