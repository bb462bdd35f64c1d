#include "routing/device_tier.h"

#include "base/placement.h"

#include <algorithm>
#include <climits>
#include <iterator>
#include <numeric>

namespace pyorch {

std::vector<ggml_backend_dev_t> devices_of(const pyorch_config & config) {
    std::vector<ggml_backend_dev_t> devices;
    for (uint64_t i = 0; i < config.n_devices; ++i) {
        devices.push_back((ggml_backend_dev_t) config.devices[i]);
    }
    return devices;
}

DeviceTier::DeviceTier(Table & table, const pyorch_config & config, const std::shared_ptr<PageLocks> & locks) :
        banks(table.map, devices_of(config), { config.device_ends, config.device_ends + config.n_devices }, locks),
        table(table), misses((pyorch_device_misses) config.device_misses), n_ahead((int) config.device_ahead),
        least_tokens((int) std::min<uint64_t>(config.device_prompt, INT_MAX)), policy((pyorch_policy) config.policy),
        budgets(config.device_bytes, config.device_bytes + config.n_devices) {}

DeviceTier::~DeviceTier() {
    {
        MutexLock lock(mutex);
        stopping = true;
    }
    wanted.notify_all();
    if (uploader.joinable()) {
        uploader.join();
    }
}

void DeviceTier::set_budget(int device, uint64_t bytes) {
    MutexLock lock(mutex);
    if (opened) {
        throw Failure(
            PYORCH_INVALID, "the memory of the device is taken when the first context is made, and stays as it is");
    }
    budgets[device] = bytes;
}

void DeviceTier::open(uint64_t landing_bytes) {
    constexpr uint64_t LANDING_SHARE = 16; // at most one part in so many of the memory; otherwise the graph copies rows
    MutexLock          lock(mutex);
    if (opened) {
        return;
    }
    // If all experts fit, no row comes from the processor.
    // Slots for experts uploaded ahead are taken from all layers, so that no layer is complete.
    std::vector<int> pool_of, n_slots;
    for (size_t i = 0; i < budgets.size(); ++i) {
        DeviceBank & bank = *banks.all()[i];
        const bool   all  = budgets[i] >= expert_bytes(table.map, bank.layers);
        bank.allocate(budgets[i] - (all ? 0 : std::min(landing_bytes, budgets[i] / LANDING_SHARE)), n_ahead == 0,
            least_tokens < DeviceAreas::NO_TOKENS);
        bank.landings.set_limit(std::max(budgets[i], bank.used()) - bank.used());
        for (const auto & pool : bank.all()) {
            n_slots.push_back(pool.n_slots);
        }
    }
    for (size_t layer = 0; layer < table.map.layers.size(); ++layer) {
        pool_of.push_back(banks.pool_of((int) layer));
    }
    all_fit = banks.have_room_for_all();
    pools   = std::make_unique<SlotPools>(table.map.n_experts(), pool_of, n_slots, policy);
    // If all fit, each expert is uploaded once and stays.
    pools->set_misses(all_fit ? PYORCH_UPLOAD : misses);
    if (n_ahead > 0 && !all_fit) {
        pools->set_ahead(n_ahead);
    }
    areas    = std::make_unique<DeviceAreas>(table, banks, least_tokens);
    uploader = std::thread([this] { work(); });
    opened   = true; // after success; otherwise the next context tries again
    std::vector<uint8_t> loaded(table.map.layers.size());
    uint64_t             n_bytes = 0;
    std::string          names;
    for (const auto & bank : banks.all()) {
        uint64_t whole_bytes = 0;
        for (int layer = bank->layers.begin; layer < bank->layers.end; ++layer) {
            whole_bytes += bank->has_whole(layer) ? bank->n_slots(layer) * table.map.layers[layer].expert_bytes() : 0;
        }
        names += whole_bytes > 0 ? (names.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(bank->device)) : "";
        n_bytes += whole_bytes;
    }
    if (n_bytes > 0) {
        notice(format("note: all experts of %s layers (%s) are read first, for %s", all_fit ? "all" : "some",
            mebibytes(n_bytes).c_str(), names.c_str()));
    }
    for (int layer = 0; layer < (int) loaded.size(); ++layer) {
        loaded[layer] = bank(layer).has_whole(layer) && load_whole(layer) && bank(layer).may_be_passed(layer);
    }
    whole = loaded;
    tell_moved();
}

static std::vector<int> all_experts(const MoeLayer & layer) {
    std::vector<int> all(layer.n_expert);
    std::iota(all.begin(), all.end(), 0);
    return all;
}

// Uploads a whole layer. REQUIRES: nothing was uploaded to it yet. Returns false if its experts cannot be read; the
// next request for them gives the reason.
bool DeviceTier::load_whole(int layer) {
    Owner                  owner{ this };
    const std::vector<int> all = all_experts(table.map.layers[layer]);
    table.acquire(owner, layer, { all, {}, Demand::SCAN_TOKENS, false, false, true, false });
    const std::vector<uint8_t> whole = bring_in_order(table, bank(layer), owner, layer, all,
        [&](size_t i, int role, const char * bytes) { return bank(layer).upload(layer, all[i], role, bytes); });
    bank(layer).wait_for_uploads();
    const bool is_whole =
        table.release(owner) && std::all_of(whole.begin(), whole.end(), [](uint8_t each) { return each != 0; });
    table.forget(owner);
    if (is_whole) {
        pools->take_whole(layer);
    }
    return is_whole;
}

// Releases a hold. REQUIRES: nothing is being copied ahead for its context.
void DeviceTier::give_back(DeviceHold & hold) {
    for (const auto & [layer, expert] : hold.experts) {
        pools->unhold(layer, expert);
    }
    hold.experts.clear();
}

// Holds the experts that have slots. Returns by expert the slot, or NONE.
std::vector<int> DeviceTier::hold_slots(DeviceHold & hold, int layer, const std::vector<int> & experts) {
    std::vector<int> slots(table.map.layers[layer].n_expert, SlotPools::NONE);
    for (int expert : experts) {
        slots[expert] = pools->slot(layer, expert);
        if (slots[expert] != SlotPools::NONE) {
            pools->hold(layer, expert);
            hold.experts.push_back({ layer, expert });
        }
    }
    return slots;
}

void DeviceTier::release(DeviceHold & hold) {
    if (areas) {
        areas->release(&hold);
    }
    MutexLock lock(mutex);
    give_back(hold);
}

// Completes the uploads that the layer waits for.
void DeviceTier::settle(int layer) {
    const auto is_seen = [&](const Upload & u) { return u.ahead || u.layer != layer || u.ended; };
    ended.wait(mutex, [&]() REQUIRES(mutex) { return std::all_of(uploads.begin(), uploads.end(), is_seen); });
    if (std::any_of(uploads.begin(), uploads.end(), [&](const Upload & u) { return u.layer == layer; })) {
        bank(layer).wait_for_uploads(); // sent data arrive
    }
    uploads.remove_if([&](const Upload & u) REQUIRES(mutex) {
        if (u.ahead || u.layer != layer) {
            return false;
        }
        u.arrived ? pools->arrived(layer, u.expert) : pools->abandon(layer, u.expert);
        return true;
    });
}

// Settles the orders for a layer that computes with these experts: ordered ones are resident now, or are uploaded next.
void DeviceTier::settle_ahead(const void * context, int layer, const std::vector<int> & experts) {
    const auto is_wanted = [&](int expert) { return std::binary_search(experts.begin(), experts.end(), expert); };
    const auto upload_of = [&](int expert) REQUIRES(mutex) {
        return std::find_if(uploads.begin(), uploads.end(),
            [&](const Upload & u) { return u.ahead && !u.dropped && u.layer == layer && u.expert == expert; });
    };
    // While this waits, more may be ordered, so the following steps run without unlocking.
    ended.wait(mutex, [&]() REQUIRES(mutex) {
        const auto & ordered = pools->ordered(context, layer);
        return std::none_of(ordered.begin(), ordered.end(), [&](int expert) REQUIRES(mutex) {
            const auto upload = upload_of(expert);
            return upload->begun && !upload->ended && is_wanted(expert);
        });
    });
    for (int expert : std::vector<int>(pools->ordered(context, layer))) {
        const bool wanted = is_wanted(expert);
        const auto upload = upload_of(expert);
        const bool comes  = upload->begun && (upload->arrived || !upload->ended);
        if (comes) {
            pools->arrived(layer, expert);
        }
        if (!wanted) {
            pools->abandon(layer, expert);
        }
        if (upload->begun && !upload->ended) {
            upload->dropped = true; // the uploading thread removes it
            continue;
        }
        if (!upload->begun) {
            queue.erase(std::find(queue.begin(), queue.end(), &*upload));
        }
        uploads.erase(upload);
    }
}

// Whether an upload to a slot runs although the expert is no longer needed there.
bool DeviceTier::is_written(int layer, int slot) const {
    return std::any_of(uploads.begin(), uploads.end(), [&](const Upload & u) {
        return u.dropped && u.slot == slot && banks.pool_of(u.layer) == banks.pool_of(layer);
    });
}

void DeviceTier::order(
    const void * context, int layer, const std::vector<ForecastExpert> & forecast, double precision) {
    if (!takes_forecasts()) {
        return;
    }
    MutexLock lock(mutex);
    if (!pools) {
        return;
    }
    for (int expert : pools->order(context, layer, forecast, precision)) {
        uploads.push_back({ layer, expert, pools->coming_to(layer, expert) });
        uploads.back().ahead = true;
        // Later entries are needed later than all of these.
        queue.insert(
            std::find_if(queue.begin(), queue.end(), [](const Upload * u) { return !u->ahead; }), &uploads.back());
    }
    wanted.notify_one();
}

void DeviceTier::forget(const void * context, int only) {
    MutexLock lock(mutex);
    if (!pools) {
        return;
    }
    for (int layer : pools->layers_ordered(context)) {
        if (only < 0 || layer == only) {
            settle_ahead(context, layer, {});
            pools->forget(context, layer);
        }
    }
}

std::vector<double> DeviceTier::learn(const RoutedBatch & batch, const Visit & visit) {
    return batch.n_tokens < Demand::SCAN_TOKENS && !visit.experts.empty() ? table.learn_visit(visit) :
                                                                            std::vector<double>();
}

// Whether nothing may be uploaded for a layer. If it does not fit into host memory, its experts pass through a window,
// except those that happen to be resident. What is computed where must not depend on that, so nothing is uploaded.
bool DeviceTier::lets_nothing_come(const RoutedBatch & batch) const {
    const std::vector<int> & found = batch.device.slots; // empty: not chosen yet
    std::vector<int>         from_host;
    std::copy_if(
        batch.wanted.begin(), batch.wanted.end(), std::back_inserter(from_host), [&](int expert) REQUIRES(mutex) {
            return (found.empty() ? pools->slot(batch.layer, expert) : found[expert]) == SlotPools::NONE;
        });
    return !batch.alone() && !batch.through_area() && !table.fits(batch.layer, from_host);
}

void DeviceTier::choose(DeviceHold & hold, RoutedBatch & batch, const Visit & visit) {
    const std::vector<double> learned = batch.overlaps() ? std::vector<double>() : learn(batch, visit);
    // A prompt that has the areas keeps them, even if a layer in between has none.
    areas->serve(batch.n_tokens, batch.decode) ? areas->stop_ahead(&hold) : areas->release(&hold);
    MutexLock lock(mutex);
    give_back(hold);
    settle(batch.layer);
    const bool stays = !batch.overlaps() && lets_nothing_come(batch);
    settle_ahead(visit.context, batch.layer, batch.through_area() || stays ? std::vector<int>() : batch.wanted);
    if (batch.through_area()) {
        pools->forget(visit.context, batch.layer);
        choose_for_area(hold, batch, batch.wanted);
        return;
    }
    if (batch.alone()) { // others do not compute what another context uploads; while this one waits, others proceed
        ended.wait(mutex, [&]() REQUIRES(mutex) {
            return std::none_of(batch.wanted.begin(), batch.wanted.end(), [&](int expert) REQUIRES(mutex) {
                return pools->known(batch.layer, expert) && pools->slot(batch.layer, expert) == SlotPools::NONE;
            });
        });
    }
    const DeviceDemand demand = { batch.wanted, batch.asked, batch.n_tokens, visit.context, stays };
    batch.device              = pools->find(batch.layer, demand);
    if (!batch.overlaps()) {
        pools->replace(batch.layer, demand, batch.device, learned);
        tell_moved();
    }
    for (int expert : batch.wanted) {
        if (batch.device.computes(expert)) {
            hold.experts.push_back({ batch.layer, expert });
        }
    }
}

int DeviceTier::last_with_area(const std::vector<int> & layers) const {
    const auto last = std::find_if(
        layers.rbegin(), layers.rend(), [&](int layer) { return !is_whole(layer) && areas->has_area(layer); });
    return last != layers.rend() ? *last : -1;
}

void DeviceTier::replace(RoutedBatch & batch, const Visit & visit) {
    const std::vector<double> learned = learn(batch, visit);
    MutexLock                 lock(mutex);
    pools->replace(batch.layer, { batch.wanted, batch.asked, batch.n_tokens, visit.context, lets_nothing_come(batch) },
        batch.device, learned);
    tell_moved();
}

void DeviceTier::tell_moved() {
    pools->tell_moved([&](int layer, const std::vector<uint8_t> & known) { table.set_above(layer, known); });
}

void DeviceTier::set_policy(pyorch_policy which) {
    MutexLock lock(mutex);
    policy = which;
    if (pools) {
        pools->seats.values.set_policy(which);
    }
}

void DeviceTier::set_limits(int layer, int min, int max) {
    MutexLock lock(mutex);
    const int n_expert = table.map.layers[layer].n_expert;
    if (!pools || min < 0 || max > n_expert || min > max) {
        throw Failure(PYORCH_INVALID,
            !pools ? "experts of a layer have limits on a device once its memory was taken" :
                     format("limits of layer %d on the device must be 0 <= min <= max <= %d, not %d and %d",
                         table.map.layers[layer].il, n_expert, min, max));
    }
    if (is_whole(layer)) {
        throw Failure(PYORCH_INVALID,
            format("layer %d lies on the device with all its experts: it has no limits there",
                table.map.layers[layer].il));
    }
    const int n_slots = pools->slots_for(layer);
    if (min > 0 && min >= n_slots) {
        throw Failure(PYORCH_BUDGET,
            format(
                "a minimum of %d experts in layer %d leaves none of the %d slots that the device has beside minima of "
                "other layers",
                min, table.map.layers[layer].il, n_slots));
    }
    // If each expert has a slot, none displaces another; and an expert that is not uploaded is computed nowhere.
    pools->set_limits(layer, min, all_fit ? n_expert : max);
    tell_moved();
}

// Sorts experts by their rows in the ubatch.
static std::vector<int> most_used_first(const RoutedBatch & batch, std::vector<int> experts) {
    std::vector<int> rows(batch.n_expert);
    std::for_each(batch.experts, batch.experts + (size_t) batch.n_tokens * batch.n_used, [&](int e) { ++rows[e]; });
    std::stable_sort(experts.begin(), experts.end(), [&](int a, int b) { return rows[a] > rows[b]; });
    return experts;
}

void DeviceTier::choose_for_area(DeviceHold & hold, RoutedBatch & batch, const std::vector<int> & experts) {
    const std::vector<int> slots  = hold_slots(hold, batch.layer, experts);
    pyorch_stats &         counts = pools->seats.counts(batch.layer);
    if (!areas->begin(&hold, batch.layer, experts, slots, batch.device.uploads)) {
        counts.device_misses += experts.size();
        return;
    }
    counts.device_misses += batch.device.uploads.size();
    counts.device_hits += experts.size() - batch.device.uploads.size();
    batch.device.slots.assign(batch.n_expert, SlotPools::NONE);
    for (int expert : experts) {
        batch.device.slots[expert] = expert;
    }
    for (int expert : batch.device.uploads) {
        batch.device.slots[expert] = SlotPools::NONE; // until it is uploaded
    }
    batch.device.behind = pools->fill(batch.layer, most_used_first(batch, experts));
    tell_moved();
}

// Uploads an expert; returns false if it could not be read. The data have arrived after bank.wait_for_uploads(). owner
// holds the expert until then, unless this call waits.
bool DeviceTier::upload(const Owner & owner, int layer, int expert, int slot, bool waits) {
    bool stays = false, readable = true;
    for (int role = 0; role < (int) table.map.layers[layer].tensors.size() && readable; ++role) {
        const char * bytes = table.address(owner, layer, expert, role, true);
        readable           = table.readable(bytes);
        stays |= readable && bank(layer).upload(layer, slot, role, bytes);
    }
    if (waits && stays) {
        bank(layer).wait_for_uploads();
    }
    return readable;
}

void DeviceTier::bring(Owner & owner, DeviceHold & hold, RoutedBatch & batch, bool next_passes) {
    if (batch.through_area()) {
        areas->bring(owner, batch.layer, batch.device.uploads);
        for (int expert : batch.device.uploads) {
            batch.device.slots[expert] = expert;
        }
        keep_passing(batch);
        if (next_passes) {
            bring_next(hold, batch.layer + 1);
        }
        count_computed(batch);
        return;
    }
    const std::vector<int> slots = places_of(batch);
    std::vector<uint8_t>   whole;
    if (batch.alone()) {
        DeviceBank & bank = this->bank(batch.layer);
        whole             = bring_in_order(table, bank, owner, batch.layer, batch.device.uploads,
            [&](size_t i, int role, const char * bytes) { return bank.upload(batch.layer, slots[i], role, bytes); });
    } else {
        // The order of a window is fixed, so the processor computes its experts.
        for (size_t i = 0; i < slots.size(); ++i) {
            const int  expert    = batch.device.uploads[i];
            const bool passes_by = owner.stream && owner.stream->place_of[expert] >= 0;
            whole.push_back(!passes_by && upload(owner, batch.layer, expert, slots[i]));
        }
    }
    arrive(hold, batch, slots, whole);
    bring_behind(owner, batch);
    count_computed(batch);
}

// Starts the uploads of the next layer while this one computes.
void DeviceTier::bring_next(DeviceHold & hold, int layer) {
    if (layer == (int) table.map.layers.size() || !areas->may_come_ahead(layer)) {
        return;
    }
    MutexLock              lock(mutex);
    const std::vector<int> slots = hold_slots(hold, layer, all_experts(table.map.layers[layer]));
    lock.unlock();
    areas->bring_ahead(layer, slots);
}

// Fills free slots with experts that pass through an area: it costs no upload, and the next prompt and the tokens after
// this one find them there.
void DeviceTier::keep_passing(const RoutedBatch & batch) {
    std::vector<int> slots;
    {
        MutexLock lock(mutex);
        for (int expert : batch.device.behind) {
            slots.push_back(pools->coming_to(batch.layer, expert));
            ended.wait(mutex, [&]() REQUIRES(mutex) { return !is_written(batch.layer, slots.back()); });
        }
    }
    for (size_t i = 0; i < slots.size(); ++i) {
        bank(batch.layer).copy_from_area(areas->number(batch.layer), batch.layer, batch.device.behind[i], slots[i]);
    }
    bank(batch.layer).wait_for_uploads();
    MutexLock lock(mutex);
    for (int expert : batch.device.behind) {
        areas->has(batch.layer, expert) ? pools->arrived(batch.layer, expert, false) :
                                          pools->abandon(batch.layer, expert);
    }
    ended.notify_all();
}

// Returns slots for experts that are uploaded first. No other upload to them runs.
std::vector<int> DeviceTier::places_of(const RoutedBatch & batch) {
    MutexLock        lock(mutex);
    std::vector<int> slots;
    for (int expert : batch.device.uploads) {
        slots.push_back(pools->coming_to(batch.layer, expert));
        ended.wait(mutex, [&]() REQUIRES(mutex) { return !is_written(batch.layer, slots.back()); });
    }
    return slots;
}

// Runs after the data have arrived.
void DeviceTier::arrive(
    DeviceHold & hold, RoutedBatch & batch, const std::vector<int> & slots, const std::vector<uint8_t> & whole) {
    bank(batch.layer).wait_for_uploads();
    MutexLock lock(mutex);
    for (size_t i = 0; i < slots.size(); ++i) {
        const int expert = batch.device.uploads[i];
        if (whole[i]) {
            pools->arrived(batch.layer, expert);
            pools->hold(batch.layer, expert);
            hold.experts.push_back({ batch.layer, expert });
            batch.device.slots[expert] = slots[i];
        } else {
            pools->abandon(batch.layer, expert);
        }
    }
    ended.notify_all();
}

void DeviceTier::count_unasked(int layer, int n_used) {
    MutexLock      lock(mutex);
    pyorch_stats & counts = pools->seats.counts(layer);
    counts.device_hits += n_used;
    counts.device_computed += n_used;
}

void DeviceTier::count_computed(const RoutedBatch & batch) {
    MutexLock lock(mutex);
    pools->seats.counts(batch.layer).device_computed += std::count_if(
        batch.device.slots.begin(), batch.device.slots.end(), [](int slot) { return slot != SlotPools::NONE; });
}

void DeviceTier::bring_behind(const Owner & owner, RoutedBatch & batch) {
    for (int expert : batch.device.behind) {
        Upload     u    = { batch.layer, expert, SlotPools::NONE };
        const bool held = table.share(owner, batch.layer, expert, u.owner);
        MutexLock  lock(mutex);
        if (!held) {
            pools->abandon(batch.layer, expert);
            continue;
        }
        u.slot = pools->coming_to(batch.layer, expert);
        uploads.push_back(std::move(u));
        queue.push_back(&uploads.back());
    }
    if (!batch.device.behind.empty()) {
        wanted.notify_one();
    }
}

void DeviceTier::work() {
    MutexLock lock(mutex);
    while (true) {
        place_thread(false);
        wanted.wait(mutex, [&]() REQUIRES(mutex) { return stopping || !queue.empty(); });
        if (queue.empty()) {
            return;
        }
        Upload & u = *queue.front();
        queue.pop_front();
        const bool wants = !stopping;
        u.begun          = true;
        bool arrived;
        {
            MutexUnlock unlock(mutex);
            const bool  held = !u.ahead || table.share_resident(u.layer, u.expert, u.owner); // or its layer reads it
            arrived          = wants && held && upload(u.owner, u.layer, u.expert, u.slot, true);
            table.unshare(u.owner);
            if (u.ahead && held) { // after the upload another expert may get its slot
                bank(u.layer).wait_for_uploads();
            }
        }
        u.arrived = arrived;
        u.ended   = true;
        if (u.dropped) {
            uploads.remove_if([&](const Upload & of) { return &of == &u; });
        }
        ended.notify_all();
    }
}

void DeviceTier::wait_idle() {
    MutexLock  lock(mutex);
    const auto has_ended = [](const Upload & u) { return u.ended; };
    ended.wait(mutex, [&]() REQUIRES(mutex) { return std::all_of(uploads.begin(), uploads.end(), has_ended); });
    if (opened) {
        lock.unlock();
        areas->wait_idle();
        banks.wait_for_uploads();
    }
}

void DeviceTier::mark(int layer, std::vector<uint8_t> & mask) {
    MutexLock lock(mutex);
    if (pools) {
        pools->seats.mark(layer, mask);
    }
}

void DeviceTier::add_stats(int only, pyorch_stats & stats) {
    MutexLock lock(mutex);
    for (size_t i = 0; only < 0 && i < budgets.size(); ++i) {
        const DeviceBank & bank = *banks.all()[i];
        const uint64_t     used = bank.used() + bank.landings.used();
        stats.device_upload_ns += bank.upload_ns();
        stats.device_bytes += bank.bytes_uploaded();
        stats.device_used_bytes += used;
        stats.device_budget_bytes +=
            all_fit ? used : std::min(budgets[i], expert_bytes(table.map, bank.layers) + bank.landings.used());
    }
    for (int layer = 0; pools && layer < (int) table.map.layers.size(); ++layer) {
        if (only >= 0 && layer != only) {
            continue;
        }
        const pyorch_stats & counts = pools->seats.counts(layer);
        add_counts(stats, counts);
        stats.device_experts += pools->seats.n_resident(layer);
        stats.device_bytes += only < 0 ? 0 : counts.device_loads * table.map.layers[layer].expert_bytes();
    }
}

void DeviceTier::reset_stats() {
    MutexLock lock(mutex);
    banks.reset_counts();
    if (pools) {
        pools->seats.reset_counts();
    }
}

} // namespace pyorch
