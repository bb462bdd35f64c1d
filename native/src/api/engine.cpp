#include "api/api.h"
#include "loading/disk_probe.h"
#include "pyorch-devices.h"
#include "routing/routing.h"

#include <algorithm>
#include <cmath>

namespace pyorch {
namespace {

void check_shares(const double * shares) {
    double sum = 0;
    for (int i = 0; i < 4; ++i) {
        if (!(shares[i] >= 0 && shares[i] <= 1)) {
            throw Failure(PYORCH_INVALID, format("a pool cannot have a share of %g: 0 to 1 can be", shares[i]));
        }
        sum += shares[i];
    }
    if (std::abs(sum - 1) > 1e-6) {
        throw Failure(PYORCH_INVALID, format("the shares of the pools sum up to %g, not 1", sum));
    }
}

void check_devices(const pyorch_config & given, int n_layers) {
    if (given.device_misses > PYORCH_UPLOAD) {
        throw Failure(PYORCH_INVALID,
            format("there is no way %llu to treat what a device lacks", (unsigned long long) given.device_misses));
    }
    if (given.device_ahead > SlotPools::MOST_AHEAD) {
        throw Failure(PYORCH_INVALID,
            format("%llu experts of a layer are too many to be uploaded ahead: 0 to %d can be",
                (unsigned long long) given.device_ahead, SlotPools::MOST_AHEAD));
    }
    if (given.n_devices > 0 && !given.plain) {
        throw Failure(
            PYORCH_INVALID, "a device needs experts as they lie in the model, not repacked for the processor");
    }
    if (given.n_devices > PYORCH_MAX_DEVICES) {
        throw Failure(PYORCH_INVALID, format("experts lie on %d devices at most", PYORCH_MAX_DEVICES));
    }
    int begin = 0;
    for (uint64_t i = 0; i < given.n_devices; begin = given.device_ends[i], ++i) {
        if (given.device_ends[i] <= begin || (i + 1 == given.n_devices) != (given.device_ends[i] == n_layers)) {
            throw Failure(PYORCH_INVALID, "devices divide all layers with experts, and each has one at least");
        }
    }
}

constexpr int32_t N_WEIGHTS = 2 * LearnedValue::N_WEIGHTS;

template <typename Number>
void write_array(Number * to, const std::vector<Number> & from) {
    if (to) {
        std::copy(from.begin(), from.end(), to);
    }
}

std::vector<float> read_array(const float * from, size_t n, const char * what, float least, float most) {
    if (!from) {
        throw Failure(PYORCH_INVALID, format("the state of the eviction policy lacks its %s", what));
    }
    std::vector<float> array(from, from + n);
    if (!std::all_of(array.begin(), array.end(), [&](float x) { return x >= least && x <= most; })) {
        throw Failure(PYORCH_INVALID, format("the state of the eviction policy has %s that cannot be", what));
    }
    return array;
}

// Keeps the n newest tokens, for which the caller has room: there may be more since it asked for the number.
void keep_newest(LearnedValue::State & state, size_t n, size_t words_of_token) {
    const size_t n_over = state.previous.size() > n ? state.previous.size() - n : 0;
    state.moments.erase(state.moments.begin(), state.moments.begin() + (std::ptrdiff_t) (n_over * words_of_token));
    state.previous.erase(state.previous.begin(), state.previous.begin() + (std::ptrdiff_t) n_over);
    for (int32_t & before : state.previous) {
        before = before < (int32_t) n_over ? -1 : before - (int32_t) n_over;
    }
}

// Returns the index of the token before each. At most one token follows each.
std::vector<int32_t> read_tokens(const pyorch_learned & given) {
    if (given.n_moments < 0 || (given.n_moments > 0 && (!given.moments || !given.previous))) {
        throw Failure(PYORCH_INVALID, "the state of the eviction policy lacks its moments");
    }
    std::vector<int32_t> previous(given.previous, given.previous + given.n_moments);
    std::vector<bool>    followed(previous.size());
    for (size_t i = 0; i < previous.size(); ++i) {
        if (previous[i] < -1 || previous[i] >= (int64_t) i || (previous[i] >= 0 && followed[(size_t) previous[i]])) {
            throw Failure(PYORCH_INVALID, "the state of the eviction policy has moments in an order that cannot be");
        }
        if (previous[i] >= 0) {
            followed[(size_t) previous[i]] = true;
        }
    }
    return previous;
}

// Checks that bits beyond the experts of the widest layer are 0.
void check_masks(const std::vector<int32_t> & masks, int n_words, int n_expert) {
    const uint32_t beyond = n_expert % 32 == 0 ? 0 : ~0u << (n_expert % 32);
    for (size_t last = (size_t) n_words - 1; last < masks.size(); last += (size_t) n_words) {
        if ((uint32_t) masks[last] & beyond) {
            throw Failure(
                PYORCH_INVALID, "the state of the eviction policy names experts that the model does not have");
        }
    }
}

// No learned value comes near it.
constexpr float LARGE = 1e6f;

} // namespace

pyorch_engine * make_engine(const pyorch_model_map * map, const pyorch_config * config, bool simulated) {
    const pyorch_config & given = *config;
    checked_choice(PYORCH_CHOICES_POLICY, given.policy, simulated);
    check_shares(given.pool_shares);
    if (given.recovery < PYORCH_RECOVERY_KERNELS || given.recovery > PYORCH_RECOVERY_EXPONENTS_FIRST) {
        throw Failure(PYORCH_INVALID, format("there is no order of recovery %d", given.recovery));
    }
    check_has_experts(map->map);
    if (map->map.slim && !map->map.layers[0].pack && !simulated) {
        throw Failure(PYORCH_FORMAT, lacks_experts(map->map));
    }
    check_devices(given, (int) map->map.layers.size());
    for (const MoeLayer & layer : map->map.layers) {
        const auto any = [](const std::vector<bool> & of) { return std::count(of.begin(), of.end(), true) > 0; };
        if (given.plain && layer.pack && (any(layer.pack->repacked) || any(layer.pack->nibbles))) {
            throw Failure(PYORCH_INVALID,
                format("experts are to be computed as they lie in the model, and %s holds them in another order",
                    map->map.files[layer.pack->file].path.c_str()));
        }
        if (given.stock && layer.pack && any(layer.pack->nibbles)) {
            throw Failure(PYORCH_INVALID,
                format("llama.cpp's kernels are to multiply experts, and %s holds nibbles, which they do not know",
                    map->map.files[layer.pack->file].path.c_str()));
        }
    }
    return new pyorch_engine(map->map, given, simulated);
}

} // namespace pyorch

using namespace pyorch;

extern "C" {

const pyorch_config pyorch_default_config = [] {
    pyorch_config config  = {};
    config.budget_bytes   = UINT64_MAX;
    config.policy         = PYORCH_LEARNED;
    config.direct_io      = 1;
    config.pool_shares[0] = 1;
    return config;
}();

pyorch_status pyorch_engine_new(const pyorch_model_map * map, const pyorch_config * config, pyorch_engine ** engine) {
    return guarded_outside_callbacks(__func__, [&] { *engine = make_engine(map, config, false); });
}

pyorch_status pyorch_engine_free(pyorch_engine * engine) {
    return guarded_outside_callbacks(__func__, [&] {
        if (engine && engine->pid == getpid()) {
            delete engine;
        }
    });
}

pyorch_status pyorch_engine_capture(pyorch_engine * engine) {
    return guarded_outside_callbacks(__func__, [&] {
        if (engine && engine->simulated) {
            throw Failure(PYORCH_INVALID, "a simulated engine reads nothing: no model can be loaded under it");
        }
        capture(engine ? &engine->routing : nullptr);
    });
}

const char * pyorch_engine_error(pyorch_engine * engine) {
    static thread_local std::string told;
    told = engine->table.last_error();
    return told.c_str();
}

const char * pyorch_decode_error(void) {
    static thread_local std::string told;
    told.clear();
    told.swap(decode_error);
    return told.c_str();
}

pyorch_status pyorch_set_budget(pyorch_engine * engine, uint64_t budget_bytes) {
    return guarded_outside_callbacks(__func__, [&] { engine->table.set_budget(budget_bytes); });
}

pyorch_status pyorch_set_device_budget(pyorch_engine * engine, int32_t device, uint64_t bytes) {
    return guarded_outside_callbacks(__func__, [&] {
        if (!engine->device) {
            throw Failure(PYORCH_INVALID, "the engine was made without a device");
        }
        if (device < 0 || (uint64_t) device >= engine->config.n_devices) {
            throw Failure(PYORCH_INVALID, format("the engine has no device %d", device));
        }
        engine->device->set_budget(device, bytes);
    });
}

pyorch_status pyorch_set_pools(pyorch_engine * engine, const double * shares) {
    return guarded_outside_callbacks(__func__, [&] {
        check_shares(shares);
        engine->table.set_pools({ 0, shares[0], shares[1], shares[2], shares[3] });
    });
}

pyorch_status pyorch_set_uses(pyorch_engine * engine, int32_t il, const double * uses, int32_t n) {
    return guarded_outside_callbacks(__func__, [&] { engine->table.set_uses(il, uses, n); });
}

pyorch_status pyorch_set_policy(pyorch_engine * engine, int32_t policy) {
    return guarded_outside_callbacks(__func__, [&] {
        checked_choice(PYORCH_CHOICES_POLICY, policy, engine->simulated);
        for (Tier * tier : engine->tiers) {
            tier->set_policy((pyorch_policy) policy);
        }
        engine->config.policy = policy;
    });
}

pyorch_status pyorch_get_learned(pyorch_engine * engine, pyorch_learned * learned) {
    return guarded_outside_callbacks(__func__, [&] {
        engine->table.with_learned([&](LearnedValue & value) {
            learned->n_layers       = value.n_layers;
            learned->n_expert       = value.n_expert;
            learned->n_tables       = LearnedValue::N_TABLES;
            learned->n_counts       = LearnedValue::N_COUNTS;
            learned->n_weights      = N_WEIGHTS;
            const size_t room       = learned->moments && learned->previous ? (size_t) learned->n_moments : 0;
            learned->n_moments      = value.n_moments();
            learned->n_moment_words = value.n_moment_words();
            if (learned->weights || learned->counts || learned->bias || learned->tables || learned->moments ||
                learned->previous) {
                LearnedValue::State state = value.export_state();
                write_array(learned->weights, state.weights);
                write_array(learned->counts, state.counts);
                write_array(learned->bias, state.bias);
                write_array(learned->tables, state.tables);
                keep_newest(state, room, (size_t) value.n_layers * (size_t) value.n_moment_words());
                learned->n_moments = (int32_t) state.previous.size();
                write_array(learned->moments, state.moments);
                write_array(learned->previous, state.previous);
            }
        });
    });
}

pyorch_status pyorch_set_learned(pyorch_engine * engine, const pyorch_learned * learned) {
    return guarded_outside_callbacks(__func__, [&] {
        const pyorch_learned & given = *learned;
        engine->table.with_learned([&](LearnedValue & value) {
            if (given.n_layers != value.n_layers || given.n_expert != value.n_expert ||
                given.n_tables != LearnedValue::N_TABLES || given.n_counts != LearnedValue::N_COUNTS ||
                given.n_weights != N_WEIGHTS) {
                throw Failure(PYORCH_INVALID,
                    format("the state of the eviction policy is of %d layers of %d experts in "
                           "%d tables, the model has %d of %d, in %d",
                        given.n_layers, given.n_expert, given.n_tables, value.n_layers, value.n_expert,
                        LearnedValue::N_TABLES));
            }
            const size_t        layers = value.n_layers, experts = value.n_expert;
            LearnedValue::State state;
            state.weights = read_array(given.weights, N_WEIGHTS, "weights", -LARGE, LARGE);
            read_array(given.weights + LearnedValue::N_WEIGHTS, LearnedValue::N_WEIGHTS, "squares", 1e-6f, LARGE);
            state.counts = read_array(given.counts, layers * LearnedValue::N_COUNTS * experts, "counts", 0, 1);
            state.bias   = read_array(given.bias, layers * experts, "bias", -LARGE, LARGE);
            state.tables =
                read_array(given.tables, layers * LearnedValue::N_TABLES * experts * experts, "tables", -LARGE, LARGE);
            state.previous = read_tokens(given);
            if (given.n_moment_words != value.n_moment_words()) {
                throw Failure(PYORCH_INVALID,
                    format("the state of the eviction policy has moments of %d words, the model needs %d",
                        given.n_moment_words, value.n_moment_words()));
            }
            state.moments.assign(
                given.moments, given.moments + (size_t) given.n_moments * layers * (size_t) given.n_moment_words);
            check_masks(state.moments, value.n_moment_words(), value.n_expert);
            value.import_state(state);
        });
    });
}

pyorch_status pyorch_measure_disk(
    const pyorch_model_map * map, const pyorch_config * config, double seconds, pyorch_disk_speed * speed) {
    return guarded_outside_callbacks(__func__, [&] {
        check_has_experts(map->map);
        if (!(seconds > 0) || seconds > 3600) {
            throw Failure(
                PYORCH_INVALID, format("a disk is measured for more than 0 seconds, at most 3600, not %g", seconds));
        }
        *speed = probe_disk(map->map, open_source(map->map, *config), plan_reads(*config), seconds);
    });
}

pyorch_status pyorch_set_observer(pyorch_engine * engine, pyorch_observer_fn observer, void * user) {
    return guarded_outside_callbacks(__func__, [&] {
        Observer & shown = engine->routing.observer;
        MutexLock  lock(shown.mutex);
        shown.function = observer;
        shown.user     = user;
        shown.active   = observer != nullptr;
    });
}

} // extern "C"
