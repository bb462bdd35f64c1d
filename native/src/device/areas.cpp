#include "device/areas.h"

#include "base/placement.h"

#include <algorithm>
#include <list>

namespace pyorch {

DeviceAreas::DeviceAreas(Table & table, DeviceBanks & banks, int least_tokens) :
        table(table), banks(banks), least_tokens(std::max(least_tokens, LEAST_TOKENS)) {
    for (const auto & bank : banks.all()) {
        const int n = bank->n_areas();
        for (int layer = bank->layers.begin; layer < bank->layers.end; ++layer) {
            index_of.push_back(n > 0 ? (int) areas.size() + layer % n : -1);
        }
        areas.resize(areas.size() + n);
    }
    if (areas.size() > 1) {
        thread = std::thread([this] { work(); });
    }
}

DeviceAreas::~DeviceAreas() {
    {
        MutexLock lock(mutex);
        ending = true;
    }
    changed.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}

DeviceAreas::Area & DeviceAreas::area_for(int layer) {
    Area & area = areas[index_of[layer]];
    if (area.layer != layer) {
        area.layer = layer;
        area.brought.assign(table.map.layers[layer].n_expert, 0);
    }
    return area;
}

bool DeviceAreas::own(const void * context) {
    MutexLock lock(mutex);
    owner = owner ? owner : context;
    return owner == context;
}

bool DeviceAreas::begin(const void * context, int layer, const std::vector<int> & experts,
    const std::vector<int> & slots, std::vector<int> & from_host) {
    MutexLock lock(mutex);
    if (owner && owner != context) {
        return false;
    }
    owner = context;
    ahead = -1;
    changed.notify_all();
    changed.wait(mutex, [&]() REQUIRES(mutex) { return !busy; });
    const Area & area = area_for(layer);
    slots_here.assign(slots.size(), -1);
    from_host.clear();
    for (int expert : experts) {
        if (area.brought[expert]) {
            continue;
        }
        if (slots[expert] >= 0) {
            slots_here[expert] = slots[expert];
        } else {
            from_host.push_back(expert);
        }
    }
    return true;
}

// Copies the experts from their slots (by expert, below 0: none), except those in the area already. REQUIRES: no other
// thread writes the area.
void DeviceAreas::copy(int layer, const std::vector<int> & slots) {
    const std::vector<uint8_t> & brought = areas[index_of[layer]].brought;
    DeviceBank &                 bank    = banks.of(layer);
    if (std::none_of(brought.begin(), brought.end(), [](uint8_t is) { return is != 0; })) {
        bank.gather_in_area(number(layer), layer, slots);
        return;
    }
    for (int expert = 0; expert < (int) slots.size(); ++expert) {
        if (slots[expert] >= 0 && !brought[expert]) {
            bank.copy_to_area(number(layer), layer, expert, slots[expert]);
        }
    }
    bank.wait_for_uploads();
}

void DeviceAreas::bring(Owner & holder, int layer, const std::vector<int> & from_host) {
    // No other thread writes the area of this layer now.
    Area &       area = areas[index_of[layer]];
    DeviceBank & bank = banks.of(layer);
    copy(layer, slots_here);
    for (size_t expert = 0; expert < slots_here.size(); ++expert) {
        area.brought[expert] |= slots_here[expert] >= 0;
    }
    const auto upload = [&](size_t i, int role, const char * bytes) {
        return bank.upload_to_area(number(layer), layer, from_host[i], role, bytes);
    };
    const std::vector<uint8_t> whole = bring_in_order(table, bank, holder, layer, from_host, upload);
    bank.wait_for_uploads(); // and those ahead
    for (size_t i = 0; i < from_host.size(); ++i) {
        area.brought[from_host[i]] = whole[i];
    }
}

void DeviceAreas::bring_ahead(int layer, const std::vector<int> & slots) {
    MutexLock lock(mutex);
    area_for(layer);
    ahead_slots = slots;
    ahead       = layer;
    changed.notify_all();
}

void DeviceAreas::stop_ahead(const void * context) {
    MutexLock lock(mutex);
    if (owner == context) {
        ahead = -1;
        changed.notify_all();
        changed.wait(mutex, [&]() REQUIRES(mutex) { return !busy; });
    }
}

void DeviceAreas::release(const void * context) {
    stop_ahead(context);
    MutexLock lock(mutex);
    if (owner == context) {
        owner = nullptr;
        changed.notify_all();
    }
}

void DeviceAreas::wait_idle() {
    MutexLock lock(mutex);
    changed.wait(mutex, [&]() REQUIRES(mutex) { return !busy && ahead < 0; });
}

void DeviceAreas::work() {
    MutexLock lock(mutex);
    while (!ending) {
        place_thread(false);
        if (ahead >= 0) {
            const int layer = ahead;
            copy_ahead(layer);
            upload_ahead(layer);
        } else {
            changed.wait(mutex, [&]() REQUIRES(mutex) { return ending || ahead >= 0; });
        }
    }
}

// Copies all experts that have slots at once: that takes a part of a millisecond.
void DeviceAreas::copy_ahead(int layer) {
    const std::vector<int> slots = ahead_slots;
    busy                         = true;
    {
        MutexUnlock unlock(mutex);
        copy(layer, slots);
    }
    for (int expert = 0; expert < (int) slots.size(); ++expert) {
        areas[index_of[layer]].brought[expert] |= slots[expert] >= 0;
    }
    busy = false;
    changed.notify_all();
}

// Uploads experts from host memory until the layer comes: some at a time, so as not to wait for each.
void DeviceAreas::upload_ahead(int layer) {
    constexpr int          AT_ONCE = 16;
    const int              number  = this->number(layer);
    const auto             n_roles = (int) table.map.layers[layer].tensors.size();
    std::vector<uint8_t> & brought = areas[index_of[layer]].brought;
    DeviceBank &           bank    = banks.of(layer);
    for (int next = 0; next < table.map.layers[layer].n_expert && ahead == layer && !ending;) {
        busy = true;
        std::vector<int> sent;
        {
            MutexUnlock      unlock(mutex);
            std::list<Owner> holders;
            bool             stays = false;
            for (; next < table.map.layers[layer].n_expert && (int) sent.size() < AT_ONCE; ++next) {
                if (brought[next]) {
                    continue;
                }
                holders.emplace_back();
                if (!table.share_resident(layer, next, holders.back())) {
                    holders.pop_back();
                    continue;
                }
                sent.push_back(next);
                for (int role = 0; role < n_roles; ++role) {
                    stays |= bank.upload_to_area(
                        number, layer, next, role, table.address(holders.back(), layer, next, role, true));
                }
            }
            if (stays) {
                bank.wait_for_uploads();
            }
            for (Owner & holder : holders) {
                table.unshare(holder);
            }
        }
        for (int expert : sent) {
            brought[expert] = 1;
        }
        busy = false;
        changed.notify_all();
    }
    busy = true; // the next layer may write there
    {
        MutexUnlock unlock(mutex);
        bank.wait_for_uploads();
    }
    busy  = false;
    ahead = ahead == layer ? -1 : ahead;
    changed.notify_all();
}

} // namespace pyorch
