#include "api/api.h"
#include "api/choices.h"
#include "api/handles.h"
#include "api/structs.h"

using namespace pyorch;

extern "C" {

pyorch_status pyorch_set_speculation(pyorch_engine * engine, int32_t mode) {
    return guarded_outside_callbacks(__func__, [&] {
        checked_choice(PYORCH_CHOICES_SPECULATE, mode);
        const pyorch_speculate before = engine->routing.speculation.mode();
        engine->routing.speculation.set((pyorch_speculate) mode);
        try {
            engine->routing.check_routers();
        } catch (const Failure &) {
            engine->routing.speculation.set(before);
            throw;
        }
        engine->prefetcher.change(
            [&](PrefetchPlanner & planner) { planner.set_speculative(mode != PYORCH_SPECULATE_NONE); });
    });
}

pyorch_status pyorch_get_speculation_counts(pyorch_engine * engine, pyorch_speculation_counts * counts) {
    return guarded([&] { write_struct(counts, "pyorch_speculation_counts", engine->routing.speculation.counts()); });
}

} // extern "C"
