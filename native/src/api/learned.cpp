#include "api/api.h"
#include "api/structs.h"
#include "engine.h"

#include <algorithm>
#include <cmath>

namespace pyorch {
namespace {

constexpr int32_t N_WEIGHTS = 2 * LearnedValue::N_WEIGHTS;

void write_array(float * to, const std::vector<float> & from) {
    if (to) {
        std::copy(from.begin(), from.end(), to);
    }
}

std::vector<float> read_array(const float * from, size_t n, const char * what, float least, float most) {
    if (!from) {
        throw Failure(PYORCH_INVALID, format("what was learned for eviction lacks its %s", what));
    }
    std::vector<float> array(from, from + n);
    if (!std::all_of(array.begin(), array.end(), [&](float x) { return x >= least && x <= most; })) {
        throw Failure(PYORCH_INVALID, format("what was learned for eviction has %s that cannot be", what));
    }
    return array;
}

// Nothing that is learned comes near it.
constexpr float LARGE = 1e6f;

} // namespace
} // namespace pyorch

using namespace pyorch;

extern "C" {

pyorch_status pyorch_learned_default(pyorch_learned * learned, uint64_t struct_size) {
    return guarded([&] { write_default(learned, struct_size, "pyorch_learned", pyorch_learned{}); });
}

pyorch_status pyorch_get_learned(pyorch_engine * engine, pyorch_learned * learned) {
    return guarded_outside_callbacks(__func__, [&] {
        pyorch_learned given = read_struct(learned, "pyorch_learned", pyorch_learned{});
        engine->table.with_learned([&](LearnedValue & value) {
            given.n_layers  = value.n_layers;
            given.n_expert  = value.n_expert;
            given.n_tables  = LearnedValue::N_TABLES;
            given.n_counts  = LearnedValue::N_COUNTS;
            given.n_weights = N_WEIGHTS;
            if (given.weights || given.counts || given.bias || given.tables) {
                const LearnedValue::State state = value.export_state();
                write_array(given.weights, state.weights);
                write_array(given.counts, state.counts);
                write_array(given.bias, state.bias);
                write_array(given.tables, state.tables);
            }
        });
        write_struct(learned, "pyorch_learned", given);
    });
}

pyorch_status pyorch_set_learned(pyorch_engine * engine, const pyorch_learned * learned) {
    return guarded_outside_callbacks(__func__, [&] {
        const pyorch_learned given = read_struct(learned, "pyorch_learned", pyorch_learned{});
        engine->table.with_learned([&](LearnedValue & value) {
            if (given.n_layers != value.n_layers || given.n_expert != value.n_expert ||
                given.n_tables != LearnedValue::N_TABLES || given.n_counts != LearnedValue::N_COUNTS ||
                given.n_weights != N_WEIGHTS) {
                throw Failure(PYORCH_INVALID,
                    format("what was learned for eviction is of %d layers of %d experts in "
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
            value.import_state(state);
        });
    });
}

} // extern "C"
