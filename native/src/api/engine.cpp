#include "api/api.h"
#include "api/choices.h"
#include "api/handles.h"
#include "api/structs.h"
#include "pyorch-devices.h"
#include "routing/routing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace pyorch {

pyorch_config default_config() {
    pyorch_config config  = {};
    config.budget_bytes   = UINT64_MAX;
    config.policy         = PYORCH_LEARNED;
    config.direct_io      = 1;
    config.pool_shares[0] = 1;
    return config;
}

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

void check_misses(const pyorch_config & given) {
    if (given.device_misses > PYORCH_ESTIMATED) {
        throw Failure(PYORCH_INVALID,
            format("there is no way %llu to treat what a device lacks", (unsigned long long) given.device_misses));
    }
    if (given.device_misses == PYORCH_ESTIMATED && !DeviceRates::of(given.device_rates).known()) {
        throw Failure(PYORCH_INVALID, "an estimate of what a device lacks needs rates above 0: measure them");
    }
}

void check_ahead(const pyorch_config & given) {
    if (given.device_ahead > DeviceTable::MOST_AHEAD) {
        throw Failure(PYORCH_INVALID,
            format("%llu experts of a layer are too many to be uploaded ahead: 0 to %d can be",
                (unsigned long long) given.device_ahead, DeviceTable::MOST_AHEAD));
    }
}

void copy_sentence(const std::string & sentence, char * buf, size_t size) {
    if (size > 0) {
        const size_t n = std::min(sentence.size(), size - 1);
        memcpy(buf, sentence.data(), n);
        buf[n] = '\0';
    }
}

} // namespace

pyorch_engine * make_engine(const pyorch_model_map * map, const pyorch_config * config, bool simulated) {
    const pyorch_config given = read_struct(config, "pyorch_config", default_config());
    checked_choice(PYORCH_CHOICES_POLICY, given.policy, simulated);
    check_shares(given.pool_shares);
    if (map->map.layers.empty()) {
        throw Failure(PYORCH_INVALID, format("%s has no routed experts", map->map.files[0].path.c_str()));
    }
    if (map->map.slim && !map->map.layers[0].pack && !simulated) {
        throw Failure(PYORCH_FORMAT, lacks_experts(map->map));
    }
    check_misses(given);
    check_ahead(given);
    if (given.device && !given.plain) {
        throw Failure(
            PYORCH_INVALID, "a device needs experts as they lie in the model, not repacked for the processor");
    }
    for (const MoeLayer & layer : map->map.layers) {
        if (given.plain && layer.pack && std::count(layer.pack->repacked.begin(), layer.pack->repacked.end(), true)) {
            throw Failure(PYORCH_INVALID,
                format("experts are to be computed as they lie in the model, and %s holds them "
                       "repacked",
                    map->map.files[layer.pack->file].path.c_str()));
        }
    }
    return new pyorch_engine(map->map, given, simulated);
}

} // namespace pyorch

using namespace pyorch;

extern "C" {

pyorch_status pyorch_config_default(pyorch_config * config, uint64_t struct_size) {
    return guarded([&] { write_default(config, struct_size, "pyorch_config", default_config()); });
}

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

pyorch_status pyorch_engine_error(pyorch_engine * engine, char * buf, size_t size) {
    return guarded([&] { copy_sentence(engine->table.last_error(), buf, size); });
}

pyorch_status pyorch_decode_error(char * buf, size_t size) {
    return guarded([&] {
        copy_sentence(decode_error, buf, size);
        decode_error.clear();
    });
}

pyorch_status pyorch_set_budget(pyorch_engine * engine, uint64_t budget_bytes) {
    return guarded_outside_callbacks(__func__, [&] { engine->table.set_budget(budget_bytes); });
}

pyorch_status pyorch_set_device_budget(pyorch_engine * engine, uint64_t bytes) {
    return guarded_outside_callbacks(__func__, [&] {
        if (!engine->device) {
            throw Failure(PYORCH_INVALID, "the engine was made without a device");
        }
        engine->device->set_budget(bytes);
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
        engine->table.set_policy((pyorch_policy) policy);
        engine->config.policy = policy;
        if (engine->device) {
            engine->device->set_policy((pyorch_policy) policy);
        }
    });
}

} // extern "C"
