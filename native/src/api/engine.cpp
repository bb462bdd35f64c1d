#include "api/api.h"
#include "api/handles.h"
#include "routing/seam.h"

#include <algorithm>
#include <cstring>

namespace pyorch {
namespace {

void check_policy(int32_t policy, bool simulated) {
    if (policy < PYORCH_LRU || policy > (simulated ? PYORCH_BELADY : PYORCH_FINEMOE)) {
        throw Failure(PYORCH_INVALID, policy == PYORCH_BELADY ? "Belady's policy needs to know the future: only a replay does" :
            format("unknown eviction policy %d", policy));
    }
}

} // namespace
} // namespace pyorch

using namespace pyorch;

extern "C" {

pyorch_status pyorch_engine_new(const pyorch_map * map, const pyorch_config * config, pyorch_engine ** engine) {
    return guarded([&] {
        check_policy(config->policy, config->simulated != 0);
        if (map->map.layers.empty()) {
            throw Failure(PYORCH_INVALID, format("%s has no routed experts", map->map.files[0].path.c_str()));
        }
        *engine = new pyorch_engine(map->map, *config);
    });
}

void pyorch_engine_free(pyorch_engine * engine) {
    delete engine;
}

pyorch_status pyorch_engine_capture(pyorch_engine * engine) {
    return guarded([&] {
        if (engine && engine->simulated) {
            throw Failure(PYORCH_INVALID, "a simulated engine reads nothing: no model can be loaded under it");
        }
        capture(engine ? &engine->table.map : nullptr, engine ? &engine->routing : nullptr);
    });
}

pyorch_status pyorch_capture_mapped(const pyorch_map * map) {
    return guarded([&] { capture(map ? &map->map : nullptr, nullptr); });
}

pyorch_status pyorch_engine_error(pyorch_engine * engine, char * buf, size_t size) {
    return guarded([&] {
        const std::string text = engine->table.last_error();
        if (size > 0) {
            const size_t n = std::min(text.size(), size - 1);
            memcpy(buf, text.data(), n);
            buf[n] = '\0';
        }
    });
}

pyorch_status pyorch_set_budget(pyorch_engine * engine, uint64_t budget_bytes) {
    return guarded([&] { engine->table.set_budget(budget_bytes); });
}

pyorch_status pyorch_set_policy(pyorch_engine * engine, int32_t policy) {
    return guarded([&] {
        check_policy(policy, engine->simulated);
        engine->table.set_policy((pyorch_policy) policy);
    });
}

} // extern "C"
