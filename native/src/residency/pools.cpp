#include "residency/pools.h"

#include "residency/policies/policy.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace pyorch {

// Half-life of a use, in tokens: ranks change more slowly than the order of eviction.
static constexpr double HALF_LIFE_TOKENS = 128;

// Only the first ranks change fast, and sorting compares all experts.
static constexpr uint64_t RANKING_TOKENS = 8;

// Ranks so close behind the last of a pool belong to it (the tolerance margin delta of ZipMoE), as a share of the
// pool's size.
static constexpr double TOLERANCE = 0.05;

// An expert whose stored parts are given up must read them again when it is no longer full. So an expert enters the
// pool of full experts only if it is used a fifth more than the first one behind it (log2); near ties change nothing.
static constexpr double MARGIN = 0.25;

// The most of the budget for the memory of loads, if it is enough for the fewest.
static constexpr double STAGING_SHARE = 1.0 / 16;

static constexpr Form HIERARCHY[] = { Form::FULL, Form::COMPRESSED, Form::SM_ONLY, Form::E_ONLY };

Pools::Pools(const ModelMap & map) : map(map) {
    if (map.parts_bytes() == 0) {
        return;
    }
    for (const MoeLayer & layer : map.layers) {
        heat.emplace_back(layer.n_expert, -INFINITY);
        before.emplace_back(layer.n_expert, -INFINITY);
    }
    for (int form = (int) Form::COMPRESSED; form < N_FORMS; ++form) {
        lists.push_back(std::make_unique<Victims>(map.n_experts()));
    }
}

void Pools::divide(uint64_t budget, uint64_t fewest, const PoolShares & shares, uint64_t transient) {
    this->transient = transient;
    limits          = {};
    staging         = 0;
    if (!any()) {
        limits[(int) Form::FULL] = budget;
        return;
    }
    const uint64_t each   = map.parts_bytes();
    const auto     most   = (uint64_t) ((double) budget * STAGING_SHARE / (double) each);
    const uint64_t n      = std::min(most, (budget - fewest) / each);
    staging               = each * std::clamp<uint64_t>(n, ModelMap::MIN_STAGED, map.max_staged());
    const uint64_t rest   = budget - staging;
    const uint64_t full   = std::max(fewest, (uint64_t) (shares[(int) Form::FULL] * (double) rest));
    double         others = 0;
    for (int form = (int) Form::COMPRESSED; form < N_FORMS; ++form) {
        others += shares[form];
    }
    for (int form = (int) Form::COMPRESSED; others > 0 && form < N_FORMS; ++form) {
        limits[form] = (uint64_t) (shares[form] / others * (double) (rest - full));
    }
    limits[(int) Form::FULL] = others > 0 ? full : rest;
    rank();
}

uint64_t Pools::stored_limit() const {
    return staging + limit(Form::COMPRESSED) + limit(Form::SM_ONLY) + limit(Form::E_ONLY);
}

double Pools::half_life() const { return HALF_LIFE_TOKENS * (double) map.layers.size(); }

void Pools::begin_with(int layer, const double * uses, uint64_t now) {
    if (!any()) {
        return;
    }
    for (size_t expert = 0; expert < heat[layer].size(); ++expert) {
        heat[layer][expert] = before[layer][expert] = std::log2(uses[expert]) + (double) now / half_life();
    }
    rank();
}

void Pools::used(int layer, int expert, uint64_t now) {
    if (!any()) {
        return;
    }
    double & h              = heat[layer][expert];
    before[layer][expert]   = h;
    h                       = fading_use(h, (double) now / half_life());
    const uint64_t n_layers = map.layers.size();
    latest                  = now;
    if (now >= ranked + std::min(RANKING_TOKENS, 1 + ranked / n_layers / 4) * n_layers) {
        ranked = now;
        rank();
    }
}

// Experts of all layers compete: a pool ends at the heat of the first rank behind it. The last pool takes all others,
// and its eviction chooses: ranks know which experts are used often, and not which are used now.
void Pools::rank() {
    std::vector<double> all;
    double              full = 0, stored[N_STORED_PARTS] = {};
    for (size_t i = 0; i < heat.size(); ++i) {
        all.insert(all.end(), heat[i].begin(), heat[i].end());
        full += (double) map.layers[i].slot_bytes() * map.layers[i].n_expert;
        for (Part part : { PART_E, PART_SM }) {
            stored[part] += (double) slot_bytes(map.layers[i], part) * map.layers[i].n_expert;
        }
    }
    const double n              = (double) all.size(); // of experts of the mean size
    const double bytes[N_FORMS] = { 0, full / n, (stored[PART_E] + stored[PART_SM]) / n, stored[PART_SM] / n,
        stored[PART_E] / n };
    double       last           = 0;
    Form         takes_all      = Form::FULL;
    for (const Form form : HIERARCHY) {
        double & next           = least[(int) form];
        next                    = INFINITY; // of an empty pool: experts may have no bytes of a form
        const uint64_t of_ranks = limit(form) - (form == Form::FULL ? std::min(transient, limit(form)) : 0);
        if (of_ranks == 0 || bytes[(int) form] == 0) {
            continue;
        }
        takes_all         = form;
        const double size = (double) of_ranks / bytes[(int) form];
        last += size;
        // Ranks r < tau, from 1. An expert with such a rank is, without its last use, no colder than the next.
        const double n_ranks = std::ceil(form == Form::FULL ? last : last + TOLERANCE * size) - 1;
        if (n_ranks >= (double) all.size()) {
            next = -INFINITY;
            continue;
        }
        const auto at = all.begin() + (long) n_ranks;
        std::nth_element(all.begin(), at, all.end(), std::greater<double>());
        next = *at;
    }
    if (takes_all != Form::FULL) {
        least[(int) takes_all] = -INFINITY;
    }
}

Form Pools::form_of(int layer, int expert, bool comes) const {
    const double uses = (comes ? heat : before)[layer][expert];
    // The heat of an expert with steady use has grown since the ranking.
    const double full = least[(int) Form::FULL] + (double) (latest - ranked) / half_life() + MARGIN;
    for (const Form form : HIERARCHY) {
        if (limit(form) > 0 && uses >= (form == Form::FULL ? full : least[(int) form])) {
            return form;
        }
    }
    return Form::ABSENT;
}

} // namespace pyorch
