#include "replay/policies/decay_bandit.h"

#include <algorithm>

namespace pyorch {
namespace {

// From nearly the last use alone to nearly all uses alike.
constexpr double HALF_LIVES[] = { 1, 4, 16, 64, 256, 2048 }; // tokens

constexpr double MEMORY = 1000; // visits, of the hits by which rates are compared
constexpr double LEAD   = 1.01; // that another rate must have before it takes over

} // namespace

DecayBandit::DecayBandit(const std::vector<int> & n_experts, const std::vector<uint64_t> & slot_bytes) :
        slot_bytes(slot_bytes) {
    for (double half_life : HALF_LIVES) {
        Arm arm = { half_life * (double) n_experts.size(), {}, {}, Victims(n_experts) };
        for (int n : n_experts) {
            arm.heat.emplace_back(n, -INFINITY);
            arm.held.emplace_back(n);
        }
        arms.push_back(std::move(arm));
    }
}

void DecayBandit::play(Arm & arm, const Visit & visit) {
    auto & heat = arm.heat[visit.layer];
    auto & held = arm.held[visit.layer];
    arm.hits *= 1 - 1 / MEMORY;
    for (int e : visit.experts) {
        arm.hits += held[e];
        arm.taken += held[e] ? 0 : slot_bytes[visit.layer];
        held[e] = 1;
        heat[e] = fading_use(heat[e], (double) now / arm.half_life);
        arm.victims.set(visit.layer, e, FOR_DEMAND, Victims::NEVER); // while the layer runs
    }
    while (arm.taken > visit.budget) {
        Victims::Least least = { -1, Victims::NEVER };
        int            of    = -1;
        for (int layer = 0; layer < (int) slot_bytes.size(); ++layer) {
            const Victims::Least own = arm.victims.least(layer, FOR_DEMAND);
            if (own.expert >= 0 && own.key < least.key) {
                least = own;
                of    = layer;
            }
        }
        if (of < 0) {
            break;
        }
        arm.victims.set(of, least.expert, FOR_DEMAND, Victims::NEVER);
        arm.held[of][least.expert] = 0;
        arm.taken -= slot_bytes[of];
    }
    for (int e : visit.experts) {
        arm.victims.set(visit.layer, e, FOR_DEMAND, heat[e]);
    }
}

void DecayBandit::visit(const Visit & visit) {
    ++now;
    size_t best = leader;
    for (size_t i = 0; i < arms.size(); ++i) {
        play(arms[i], visit);
    }
    for (size_t i = 0; i < arms.size(); ++i) {
        best = arms[i].hits > arms[best].hits ? i : best;
    }
    switched = arms[best].hits > LEAD * arms[leader].hits;
    leader   = switched ? best : leader;
}

} // namespace pyorch
