#include "replay/simulated_device.h"

#include "device/areas.h"
#include "replay/policies/replay_policies.h"

#include <algorithm>

namespace pyorch {

SimulatedDevice::SimulatedDevice(Table & table, const pyorch_replay_config & config) :
        table(table), seconds_per_byte(config.link_bytes_per_second > 0 ? 1 / config.link_bytes_per_second : 0),
        coming(table.map.layers.size()), arrival_of(table.map.layers.size()), ahead((int) config.device_ahead),
        ordered(table.map.layers.size()) {
    const LayerRange layers = all_layers(table.map);
    const uint64_t   all    = expert_bytes(table.map, layers);
    uint64_t         area   = 1;
    std::vector<int> n_slots, pool_of;
    for (const auto & of : table.map.layers) {
        area = std::max(area, of.n_expert * of.expert_bytes());
    }
    slots_bytes = std::min((uint64_t) config.device_bytes, all);
    n_areas     = slots_bytes < all ? n_device_areas(slots_bytes, area) : 0;
    slots_bytes -= n_areas * area;
    const double share   = (double) slots_bytes / (double) all;
    const int    n_whole = ahead > 0 ? 0 : n_whole_layers(table.map, layers, share);
    for (const DevicePool & pool : form_device_pools(table.map, layers, share, n_whole, pool_of)) {
        n_slots.push_back(pool.n_slots);
    }
    pools = std::make_unique<SlotPools>(
        table.map.n_experts(), pool_of, n_slots, (pyorch_policy) config.device_policy, replay_policies());
    pools->set_misses(slots_bytes == all ? PYORCH_UPLOAD : (pyorch_device_misses) config.device_misses);
    if (ahead > 0 && slots_bytes < all) {
        pools->set_ahead(ahead);
    }
    for (int of = 0; of < n_whole; ++of) {
        pools->take_whole(of); // before the first token
        bytes += table.map.layers[of].n_expert * table.map.layers[of].expert_bytes();
    }
}

SimulatedDevice::~SimulatedDevice() {
    for (size_t of = 0; of < coming.size(); ++of) {
        table.set_above((int) of, std::vector<uint8_t>(table.map.layers[of].n_expert));
    }
}

double SimulatedDevice::send(double now, uint64_t n_bytes) {
    bytes += n_bytes;
    free_at = std::max(now, free_at) + (double) n_bytes * seconds_per_byte;
    return free_at;
}

void SimulatedDevice::order(
    const void * context, int of, const std::vector<ForecastExpert> & forecast, double precision, double now) {
    std::vector<uint8_t> resident;
    table.resident(of, resident);
    for (int expert : pools->order(context, of, forecast, precision)) {
        const double begins = std::max(now, free_at);
        const double ends   = resident[expert] ? send(now, table.map.layers[of].expert_bytes()) : begins;
        ordered[of].push_back({ expert, resident[expert] != 0, begins, ends });
    }
}

// Waits for uploads that the layer needs and the link has begun; cancels uploads that the link has not begun.
double SimulatedDevice::settle_ahead(const void * context, const std::vector<int> & experts, double now) {
    double arrival = now;
    for (auto last = ordered[layer].rbegin(); last != ordered[layer].rend(); ++last) { // the last is cancelled first
        const Ordered & of     = *last;
        const bool      wanted = std::binary_search(experts.begin(), experts.end(), of.expert);
        const bool      comes  = of.was_held && (of.begins < now || of.ends <= now);
        if (of.was_held && !comes) {
            bytes -= table.map.layers[layer].expert_bytes();
            free_at = of.ends == free_at ? of.begins : free_at;
        }
        if (comes) {
            arrival = wanted ? std::max(arrival, of.ends) : arrival;
            pools->arrived(layer, of.expert);
        }
        if (!wanted) {
            pools->abandon(layer, of.expert);
        }
    }
    ordered[layer].clear();
    if (experts.empty()) {
        pools->forget(context, layer);
    }
    return arrival;
}

DevicePass SimulatedDevice::begin(const Visit & visit, int n_tokens, bool decode, double & now) {
    const std::vector<int> & experts = visit.experts;
    for (int expert : held) {
        pools->unhold(layer, expert);
    }
    held.clear();
    layer = visit.layer;
    if (!coming[layer].empty()) {
        now = std::max(now, arrival_of[layer]);
        for (const auto & [expert, was_held] : coming[layer]) {
            was_held ? pools->arrived(layer, expert) : pools->abandon(layer, expert);
        }
        coming[layer].clear();
    }
    const bool through_area = !decode && n_tokens >= DeviceAreas::LEAST_TOKENS && n_areas > 0;
    now                     = settle_ahead(visit.context, through_area ? std::vector<int>() : experts, now);
    if (through_area) {
        DevicePass pass = { std::vector<int>(table.map.layers[layer].n_expert, SlotPools::NONE) };
        for (int expert : experts) {
            pass.slots[expert] = pools->slot(layer, expert);
            if (pass.slots[expert] == SlotPools::NONE) {
                pass.uploads.push_back(expert);
            }
        }
        pools->seats.counts(layer).device_hits += experts.size() - pass.uploads.size();
        pools->seats.counts(layer).device_misses += pass.uploads.size();
        pools->seats.counts(layer).device_computed += experts.size() - pass.uploads.size();
        return pass;
    }
    std::vector<double> learned;
    if (n_tokens < Demand::SCAN_TOKENS) {
        learned = table.learn_visit(visit);
    }
    DevicePass pass = pools->pass(layer, { experts, experts, n_tokens, visit.context }, learned);
    for (int expert : experts) {
        if (pass.slots[expert] != SlotPools::NONE) {
            held.push_back(expert);
        }
    }
    pools->seats.counts(layer).device_computed += held.size();
    pools->tell_moved([&](int of, const std::vector<uint8_t> & known) { table.set_above(of, known); });
    return pass;
}

double SimulatedDevice::bring(
    const Owner & owner, const DevicePass & pass, double now, std::vector<uint8_t> & on_time) {
    const auto     passes_by = [&](int expert) { return owner.stream && owner.stream->place_of[expert] >= 0; };
    const uint64_t size      = table.map.layers[layer].expert_bytes();
    on_time.assign(pass.slots.size(), 0);
    for (int expert : pass.uploads) {
        if (!pools->known(layer, expert)) { // through an area
            on_time[expert] = 1;
            now             = send(now, size);
        } else if (passes_by(expert)) {
            pools->abandon(layer, expert);
        } else {
            on_time[expert] = 1;
            now             = send(now, size);
            pools->arrived(layer, expert);
            pools->hold(layer, expert);
            held.push_back(expert);
        }
        pools->seats.counts(layer).device_computed += on_time[expert];
    }
    for (int expert : pass.behind) {
        if (!passes_by(expert)) {
            arrival_of[layer] = send(now, size);
        }
        coming[layer].push_back({ expert, !passes_by(expert) });
    }
    return now;
}

void SimulatedDevice::reset_counts() {
    pools->seats.reset_counts();
    bytes = 0;
}

void SimulatedDevice::add_counts(pyorch_replay_result & result) const {
    for (size_t of = 0; of < coming.size(); ++of) {
        const pyorch_stats & counts = pools->seats.counts((int) of);
        result.device_hits += (int64_t) counts.device_hits;
        result.device_misses += (int64_t) counts.device_misses;
        result.device_computed += (int64_t) counts.device_computed;
        result.device_loads += (int64_t) counts.device_loads;
        result.device_evictions += (int64_t) counts.device_evictions;
        result.device_ahead += (int64_t) counts.device_ahead;
        result.device_ahead_hits += (int64_t) counts.device_ahead_hits;
        result.device_ahead_late += (int64_t) counts.device_ahead_late;
    }
    result.device_bytes = (int64_t) bytes;
}

} // namespace pyorch
