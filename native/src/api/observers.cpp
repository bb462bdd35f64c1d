#include "api/api.h"
#include "api/handles.h"
#include "api/structs.h"

using namespace pyorch;

extern "C" {

pyorch_status pyorch_routing_default(pyorch_routing * routing, uint64_t struct_size) {
    return guarded([&] { write_default(routing, struct_size, "pyorch_routing", pyorch_routing{}); });
}

pyorch_status pyorch_set_observer(pyorch_engine * engine, pyorch_observer_fn observer, void * user) {
    return guarded_outside_callbacks(__func__, [&] {
        Observer &                  shown = engine->routing.observer;
        std::lock_guard<std::mutex> lock(shown.mutex);
        shown.function = observer;
        shown.user     = user;
        shown.active   = observer != nullptr;
    });
}

pyorch_status pyorch_set_prediction_observer(pyorch_engine * engine, pyorch_prediction_fn observer, void * user) {
    return guarded_outside_callbacks(__func__, [&] {
        PrefetchPlanner::Observer shown;
        if (observer) {
            shown = [=](const void * context, int from, const Forecast & new_forecast) {
                const auto &               layers = engine->table.map.layers;
                const std::vector<int32_t> experts(new_forecast.experts.begin(), new_forecast.experts.end());
                CallbackScope              scope;
                observer(user, context, from < 0 ? -1 : layers[from].il, layers[new_forecast.layer].il, experts.data(),
                    (int32_t) experts.size());
            };
        }
        engine->prefetcher.change([&](PrefetchPlanner & planner) { planner.set_observer(std::move(shown)); });
    });
}

} // extern "C"
