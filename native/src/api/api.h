// What the files of this folder share. Each stands for a section of the headers, or a few: it checks arguments, calls
// the core, and lets no exception out. What the numbers mean is decided in the core.

#pragma once

#include "base/callback.h"
#include "base/status.h"
#include "engine.h"
#include "model/model_map.h"
#include "prediction/expert_maps.h"

#include <new>

// What the opaque types of the headers are, where the core does not define them itself.
struct pyorch_model_map {
    pyorch::ModelMap map;
};

struct pyorch_history {
    std::shared_ptr<pyorch::ExpertMapStore> store;
};

namespace pyorch {

// The sentence of a failure, for pyorch_last_error() of the calling thread.
void set_last_error(const char * sentence);

// Runs what a function of the API does; what it throws becomes the status and the sentence of the call.
template <typename Body>
pyorch_status guarded(Body body) {
    try {
        body();
        return PYORCH_OK;
    } catch (const Failure & e) {
        set_last_error(e.what());
        return e.status;
    } catch (const std::bad_alloc &) {
        set_last_error("the system has no memory left for this");
        return PYORCH_MEMORY;
    } catch (const std::length_error &) { // a container that no memory would hold
        set_last_error("the system has no memory left for this");
        return PYORCH_MEMORY;
    } catch (const std::exception & e) {
        set_last_error(e.what());
        return PYORCH_IO;
    }
}

// The same for what is not allowed inside a callback. function: its name.
template <typename Body>
pyorch_status guarded_outside_callbacks(const char * function, Body body) {
    return guarded([&] {
        if (in_callback()) {
            throw Failure(PYORCH_CALLBACK,
                format("%s cannot be called inside a callback, for which it might wait: "
                       "call it from another thread, or afterwards",
                    function));
        }
        body();
    });
}

// The choice with that value; throws Failure where there is none, or it is for replays and this is none.
const pyorch_choice & checked_choice(int32_t which, int32_t value, bool in_replay = false);

// Checks what is given. simulated: for replays.
pyorch_engine * make_engine(const pyorch_model_map * map, const pyorch_config * config, bool simulated);

// Why nothing reads experts of a slim model without its pack.
inline std::string lacks_experts(const ModelMap & map) {
    return format("%s is slim: its experts are in a pack, which must lie beside it", map.files[0].path.c_str());
}

inline void check_has_experts(const ModelMap & map) {
    if (map.layers.empty()) {
        throw Failure(PYORCH_INVALID, format("%s has no routed experts", map.files[0].path.c_str()));
    }
}

inline void check_experts(const pyorch_engine * engine, int layer, int n_expert) {
    const MoeLayer & l = engine->table.map.layers[layer];
    if (n_expert != l.n_expert) {
        throw Failure(PYORCH_INVALID, format("layer %d has %d experts, not %d", l.il, l.n_expert, n_expert));
    }
}

// Zeros behind it.
template <size_t N>
void copy_text(char (&to)[N], const std::string & text) {
    std::fill(std::copy_n(text.begin(), std::min(text.size(), N - 1), to), to + N, '\0');
}

} // namespace pyorch
