// Helpers of the files in this folder. Each file implements one or more sections of the headers: it checks arguments,
// calls the core, and catches all exceptions. The core gives numbers their meaning.

#pragma once

#include "base/callback.h"
#include "base/status.h"
#include "engine.h"
#include "model/model_map.h"
#include "prediction/expert_maps.h"

#include <new>

// Definitions of the headers' opaque types, if the core does not define them.
struct pyorch_model_map {
    pyorch::ModelMap map;
};

struct pyorch_history {
    std::shared_ptr<pyorch::ExpertMapStore> store;
};

namespace pyorch {

// Sets the sentence that pyorch_last_error() returns on the calling thread.
void set_last_error(const char * sentence);

// Runs the body of an API function. An exception becomes the status and the sentence of the call.
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
    } catch (const std::length_error &) { // a container larger than any memory
        set_last_error("the system has no memory left for this");
        return PYORCH_MEMORY;
    } catch (const std::exception & e) {
        set_last_error(e.what());
        return PYORCH_IO;
    }
}

// The same for functions that a callback must not call. function: its name.
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

// Returns the choice with that value. Throws Failure if there is none, or if it exists only in replays and in_replay is
// false.
const pyorch_choice & checked_choice(int32_t which, int32_t value, bool in_replay = false);

// Checks its arguments. simulated: for replays.
pyorch_engine * make_engine(const pyorch_model_map * map, const pyorch_config * config, bool simulated);

// Returns the message for a slim model without its pack.
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

// Copies a text and pads it with zeros.
template <size_t N>
void copy_text(char (&to)[N], const std::string & text) {
    std::fill(std::copy_n(text.begin(), std::min(text.size(), N - 1), to), to + N, '\0');
}

} // namespace pyorch
