// A residency table with a reader that reads when told to, for tests that look at the table alone.

#pragma once

#include "check.h"
#include "synthetic.h"

#include "banks/host_bank.h"
#include "replay/policies/replay_policies.h"
#include "residency/table.h"

namespace pyorch {

constexpr int SMALL = 64;    // rows: experts of 6 KiB
constexpr int LARGE = 32768; // rows: experts of 3 MiB

// A table of layers with 16 experts, a context and a reader.
struct House {
    static constexpr int N_EXPERT = 16;

    template <typename Rows>
    House(int n_layers, double share, pyorch_policy policy, Rows rows, const Codec & codec = plain_codec(),
        int n_used = 0) :
            map(synthetic_map(path, n_layers, N_EXPERT, rows, n_used)),
            table(map, std::make_unique<HostBank>(map, budget(share)), call_source(touch_pages, nullptr), codec,
                config(share, policy), replay_policies()),
            reader(table.loader()) {}

    House(int n_layers, double share, pyorch_policy policy = PYORCH_LRU) :
            House(n_layers, share, policy, [](int) { return SMALL; }) {}

    const ModelMap map;
    Table          table;
    LocalReader    reader;
    Owner          owner = { this };

    uint64_t budget(double share) const {
        return std::max(map.floor_bytes(), (uint64_t) (share * (double) map.slots_bytes()));
    }

    pyorch_config config(double share, pyorch_policy policy) const {
        pyorch_config config = {};
        config.budget_bytes  = budget(share);
        config.policy        = policy;
        return config;
    }

    // A pass of a context through a layer, with all its reads.
    bool pass(Owner & who, int layer, const std::vector<int> & experts, int n_tokens = 1) {
        return pass(who, layer, experts, experts, n_tokens);
    }

    bool pass(Owner & who, int layer, const std::vector<int> & experts, const std::vector<int> & asked, int n_tokens) {
        table.acquire(who, layer, { experts, asked, n_tokens });
        reader.read_all();
        return table.release(who);
    }

    bool pass(int layer, const std::vector<int> & experts, int n_tokens = 1) {
        return pass(owner, layer, experts, n_tokens);
    }

    void want(const Owner & who, int layer, int from, const std::vector<int> & experts) {
        std::vector<Table::Want> wants;
        for (int e : experts) {
            wants.push_back({ e, 0.5, true, false });
        }
        table.want(who.context, layer, from, wants);
    }

    bool resident(int layer, int expert) {
        std::vector<uint8_t> mask;
        table.resident(layer, mask);
        return mask[expert] != 0;
    }

    int n_resident(int layer) {
        pyorch_stats of_layer = {};
        table.add_stats(layer, of_layer);
        return (int) of_layer.resident_experts;
    }

    pyorch_stats stats() {
        pyorch_stats all = {};
        table.add_stats(-1, all);
        return all;
    }
};

inline std::vector<int> range(int begin, int end) {
    std::vector<int> ids;
    for (int id = begin; id < end; ++id) {
        ids.push_back(id);
    }
    return ids;
}

inline const std::vector<int> ALL = range(0, House::N_EXPERT);

} // namespace pyorch
