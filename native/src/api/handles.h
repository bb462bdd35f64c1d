// What the opaque types of the headers are, where the core does not define them itself, and checks that several
// sections make of arguments.

#pragma once

#include "base/status.h"
#include "engine.h"
#include "model/model_map.h"
#include "prediction/expert_maps.h"

struct pyorch_model_map {
    pyorch::ModelMap map;
};

struct pyorch_history {
    std::shared_ptr<pyorch::ExpertMapStore> store;
};

namespace pyorch {

// What pyorch_config_default gives.
pyorch_config default_config();

// Checks what is given. simulated: for replays.
pyorch_engine * make_engine(const pyorch_model_map * map, const pyorch_config * config, bool simulated);

// Why nothing reads experts of a slim model without its pack.
inline std::string lacks_experts(const ModelMap & map) {
    return format("%s is slim: its experts are in a pack, which must lie beside it", map.files[0].path.c_str());
}

inline void check_experts(const pyorch_engine * engine, int layer, int n_expert) {
    const MoeLayer & l = engine->table.map.layers[layer];
    if (n_expert != l.n_expert) {
        throw Failure(PYORCH_INVALID, format("layer %d has %d experts, not %d", l.il, l.n_expert, n_expert));
    }
}

} // namespace pyorch
