#include "banks/slot_bank.h"

#include <algorithm>
#include <map>

namespace pyorch {

SlotBank::SlotBank(const ModelMap & map, uint64_t budget) : limit(budget) {
    std::map<uint64_t, int> by_size;
    for (const auto & layer : map.layers) {
        class_of.emplace_back(N_FORMS, -1);
        for (int form = 0; form < N_FORMS; ++form) {
            const uint64_t bytes = slot_bytes(layer, (Form) form);
            if (bytes == 0) {
                continue;
            }
            const auto [place, is_new] = by_size.emplace(bytes, (int) classes.size());
            if (is_new) {
                classes.push_back({ bytes });
            }
            classes[place->second].n_experts += layer.n_expert;
            class_of.back()[form] = place->second;
        }
    }
}

bool SlotBank::fits(int size_class, int n) const {
    return taken_bytes + n * classes[size_class].slot_bytes <= limit;
}

Slot SlotBank::take(int size_class) {
    SizeClass &    c     = classes[size_class];
    const uint64_t bytes = c.slot_bytes;
    if (!fits(size_class, 1)) {
        return {};
    }
    char *     memory;
    const bool fresh = c.kept.empty();
    if (!fresh) {
        memory = c.kept.back();
        c.kept.pop_back();
        kept_bytes -= bytes;
    } else {
        strip_kept(limit - bytes);
        if (!c.bare.empty()) {
            memory = c.bare.back();
            c.bare.pop_back();
        } else {
            memory = extend(size_class);
        }
        if (!memory) {
            return {};
        }
    }
    taken_bytes += bytes;
    peak_bytes   = std::max(peak_bytes, used());
    return { size_class, memory, fresh };
}

void SlotBank::give(const Slot & slot) {
    SizeClass & c = classes[slot.size_class];
    taken_bytes -= c.slot_bytes;
    if (used() + c.slot_bytes > limit) {
        give_up(slot.size_class, slot.memory); // the budget was lowered meanwhile
        c.bare.push_back(slot.memory);
        return;
    }
    kept_bytes += c.slot_bytes;
    c.kept.push_back(slot.memory);
}

void SlotBank::give_up(int size_class, char * slot) {
    strip(size_class, slot);
    if (given_up) {
        given_up(slot);
    }
}

void SlotBank::strip_kept(uint64_t until) {
    for (int i = 0; i < (int) classes.size(); ++i) {
        SizeClass & c = classes[i];
        while (!c.kept.empty() && used() > until) {
            give_up(i, c.kept.back());
            c.bare.push_back(c.kept.back());
            c.kept.pop_back();
            kept_bytes -= c.slot_bytes;
        }
    }
}

void SlotBank::set_budget(uint64_t bytes) {
    limit = bytes;
    strip_kept(bytes);
}

} // namespace pyorch
