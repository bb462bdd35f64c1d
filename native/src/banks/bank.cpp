#include "banks/bank.h"

#include <algorithm>
#include <map>

namespace pyorch {

Bank::Bank(const ModelMap & map, uint64_t budget) {
    matrices.limit = budget;
    std::map<std::pair<bool, uint64_t>, int> by_size;
    for (const auto & layer : map.layers) {
        class_of.emplace_back(N_PARTS, -1);
        for (Part part : { PART_MATRICES, PART_E, PART_SM }) {
            const bool     is_stored = part != PART_MATRICES;
            const uint64_t bytes     = slot_bytes(layer, part);
            if (bytes == 0) {
                continue;
            }
            const auto [place, is_new] = by_size.emplace(std::pair(is_stored, bytes), (int) classes.size());
            if (is_new) {
                classes.push_back({ bytes, is_stored });
            }
            classes[place->second].n_experts += layer.n_expert;
            class_of.back()[part] = place->second;
        }
    }
}

bool Bank::fits(int size_class, int n) const {
    const SizeClass & c     = classes[size_class];
    const uint64_t    bytes = n * c.slot_bytes;
    return c.is_stored ? stored.taken + bytes <= stored.limit :
                         matrices.taken + bytes <= matrices.limit && matrices.taken + stored.taken + bytes <= budget();
}

Slot Bank::take(int size_class) {
    SizeClass &    c       = classes[size_class];
    Account &      account = account_of(c);
    const uint64_t bytes   = c.slot_bytes;
    if (!fits(size_class, 1)) {
        return {};
    }
    char *     memory;
    const bool fresh = c.kept.empty();
    if (!fresh) {
        memory = c.kept.back();
        c.kept.pop_back();
        account.kept -= bytes;
    } else {
        strip_kept(account, account.limit - bytes);
        strip_for(bytes);
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
    account.taken += bytes;
    peak_bytes = std::max(peak_bytes, used());
    return { size_class, memory, fresh };
}

void Bank::give(const Slot & slot) {
    SizeClass & c       = classes[slot.size_class];
    Account &   account = account_of(c);
    account.taken -= c.slot_bytes;
    if (account.used() + c.slot_bytes > account.limit || used() + c.slot_bytes > budget()) {
        give_up(slot.size_class, slot.memory); // the budget has been lowered
        c.bare.push_back(slot.memory);
        return;
    }
    account.kept += c.slot_bytes;
    c.kept.push_back(slot.memory);
}

void Bank::give_up(int size_class, char * slot) {
    strip(size_class, slot);
    if (given_up) {
        given_up(slot);
    }
}

void Bank::strip_kept(Account & account, uint64_t until) {
    for (int i = 0; i < (int) classes.size(); ++i) {
        SizeClass & c = classes[i];
        while (&account_of(c) == &account && !c.kept.empty() && account.used() > until) {
            give_up(i, c.kept.back());
            c.bare.push_back(c.kept.back());
            c.kept.pop_back();
            account.kept -= c.slot_bytes;
        }
    }
}

void Bank::strip_for(uint64_t bytes) {
    for (Account * account : { &matrices, &stored }) {
        const uint64_t others = used() - account->used();
        strip_kept(*account, budget() > others + bytes ? budget() - others - bytes : 0);
    }
}

void Bank::set_budget(uint64_t bytes, uint64_t stored_bytes) {
    matrices.limit = bytes - stored_bytes;
    stored.limit   = stored_bytes;
    strip_kept(matrices, matrices.limit);
    strip_kept(stored, stored.limit);
    strip_for(0);
}

} // namespace pyorch
