#include "api/api.h"
#include "base/placement.h"
#include "base/status.h"
#include "model/fatal.h"
#include "prediction/predictor_list.h"
#include "replay/policies/replay_policies.h"

#include <algorithm>
#include <array>

namespace pyorch {

static thread_local std::string last_error;

void set_last_error(const char * sentence) { last_error = sentence; }

namespace {

pyorch_choice choice(int32_t value, const char * name, const char * description, unsigned needs = 0, unsigned uses = 0,
    bool executable = false) {
    return { value, needs, uses, executable, name, description };
}

std::vector<pyorch_choice> policies() {
    std::vector<pyorch_choice> list;
    for (const PolicyEntry & p : replay_policies()) {
        list.push_back(choice(p.kind, p.name, p.description, p.needs, p.uses));
    }
    return list;
}

std::vector<pyorch_choice> predictors() {
    std::vector<pyorch_choice> list;
    for (const PredictorEntry & p : predictor_list()) {
        list.push_back(choice(p.kind, p.name, p.description, p.needs, p.uses, p.executable));
    }
    return list;
}

struct Choices {
    const char *               what;
    std::vector<pyorch_choice> list; // by ascending value
};

// Returns the list for a pyorch_choices, null if there is none.
const Choices * choices(int32_t which) {
    static const std::array<Choices, 7> all = { {
        { "eviction policy", policies() },
        { "predictor", predictors() },
        { "mode of speculation",
            {
                choice(PYORCH_SPECULATE_NONE, "none", "layers compute with what their routers choose"),
                choice(PYORCH_SPECULATE_DECODE, "decode",
                    "with what was forecast, in ubatches of one token of each sequence", PYORCH_NEEDS_FORECASTS),
                choice(PYORCH_SPECULATE_ALL, "all", "with what was forecast, in prompts too", PYORCH_NEEDS_FORECASTS),
            } },
        { "mode of substitution",
            {
                choice(PYORCH_SUBSTITUTE_NONE, "none", "nothing stands in for an absent expert"),
                choice(PYORCH_SUBSTITUTE_BUDDIES, "buddies", "a resident buddy stands in", PYORCH_NEEDS_BUDDIES),
                choice(PYORCH_SUBSTITUTE_RANDOM, "random", "any resident expert stands in: the baseline"),
                choice(PYORCH_SUBSTITUTE_CACHE, "cache", "the resident expert that the router ranks highest stands in"),
            } },
        { "order of substitution",
            {
                choice(PYORCH_ORDER_RANK, "rank", "absent experts are treated as the router ranks them"),
                choice(PYORCH_ORDER_WEIGHT, "weight", "the lowest weight first"),
            } },
        { "treatment of a miss",
            {
                choice(PYORCH_MISS_FETCH, "fetch", "what no substitute covers is read"),
                choice(PYORCH_MISS_DROP, "drop", "what no substitute covers is left out"),
                choice(PYORCH_MISS_GHOST, "ghost", "what no substitute covers is computed by its ghost",
                    PYORCH_NEEDS_GHOSTS),
            } },
        { "gating function",
            {
                choice(PYORCH_GATING_SOFTMAX, "softmax", "a softmax of all logits"),
                choice(PYORCH_GATING_SIGMOID, "sigmoid", "the sigmoid of each logit"),
                choice(PYORCH_GATING_SOFTMAX_SELECTED, "softmax-selected", "a softmax of the logits of the selected"),
                choice(PYORCH_GATING_SQRT_SOFTPLUS, "sqrt-softplus", "the square root of each logit's softplus"),
            } },
    } };
    return which < 0 || (size_t) which >= all.size() ? nullptr : &all[which];
}

} // namespace

const pyorch_choice & checked_choice(int32_t which, int32_t value, bool in_replay) {
    const auto & [what, list] = *choices(which);
    const auto found =
        std::find_if(list.begin(), list.end(), [&](const pyorch_choice & choice) { return choice.value == value; });
    if (found == list.end()) {
        throw Failure(PYORCH_INVALID, format("unknown %s %d", what, value));
    }
    if ((found->needs & PYORCH_NEEDS_FUTURE) && !in_replay) {
        throw Failure(
            PYORCH_INVALID, format("the %s %s needs to know the future: only a replay does", what, found->name));
    }
    if ((found->needs & PYORCH_NEEDS_REPLAY) && !in_replay) {
        throw Failure(PYORCH_INVALID,
            format("the %s %s is there to be compared with: only a replay takes it", what, found->name));
    }
    return *found;
}

} // namespace pyorch

using namespace pyorch;

extern "C" {

const char * pyorch_last_error(void) { return last_error.c_str(); }

int32_t pyorch_abi(void) { return PYORCH_ABI; }

const char * pyorch_version(void) { return PYORCH_VERSION; }

const pyorch_choice * pyorch_get_choice(int32_t which, int32_t index) {
    const Choices * of = choices(which);
    return !of || index < 0 || (size_t) index >= of->list.size() ? nullptr : &of->list[index];
}

void pyorch_show_fatal_errors(void) { show_fatal_errors(); }

void pyorch_notice(const char * line) { notice(line); }

pyorch_status pyorch_set_compute_cpus(const int32_t * cpus, int32_t n_cpus) {
    return guarded([&] { set_compute_cpus(std::vector<int>(cpus, cpus + n_cpus)); });
}

void pyorch_refuse_fatal_errors(int32_t on) { guard_fatal_errors(on != 0); }

} // extern "C"
